"""What a sandbox alone has of its memory is copied into its VM when it comes back: it then maps, and shares, its template's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from agentenv.config.schema import VmmConfig
from agentenv.core.errors import AgentEnvError
from agentenv.core.lifecycle import State
from agentenv.core.model import RunningVm
from agentenv.testing.fake_node import FakeNode

Back = Callable[[FakeNode, str], Awaitable[object]]


async def _pause_and_resume(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.resume(sandbox_id, 600)


async def _checkpoint_and_roll_back(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.checkpoint(sandbox_id, "")
    await node.orchestrator.rollback(sandbox_id)


_WAYS = pytest.mark.parametrize("back", [_pause_and_resume, _checkpoint_and_roll_back])


def _vm(node: FakeNode, sandbox_id: str) -> RunningVm:
    vm = node.row(sandbox_id).vm
    assert vm is not None
    return vm


async def _rest(node: FakeNode) -> None:
    await node.quiesce()
    assert node.problems() == []


def _copies_at_most(node: FakeNode, size_mb: int) -> None:
    node.parts.config = node.config.model_copy(update={"vmm": VmmConfig(own_memory_copied_mb=size_mb)})


@_WAYS
async def test_however_often_it_comes_back_it_maps_what_its_template_has(node: FakeNode, back: Back) -> None:
    sandbox_id = await node.create()
    template = _vm(node, sandbox_id)
    for number in range(5):
        assert node.process(sandbox_id).write(str(number % 3), str(number))
        before = dict(node.content(sandbox_id))
        await back(node, sandbox_id)
        vm = _vm(node, sandbox_id)
        assert (vm.memory_stack, vm.memory_layers) == (template.memory_stack, template.memory_layers)
        assert node.content(sandbox_id) == before
        await _rest(node)


@_WAYS
async def test_one_that_has_too_much_of_its_own_maps_all_of_it(node: FakeNode, back: Back) -> None:
    sandbox_id = await node.create()
    _copies_at_most(node, 1)
    assert node.process(sandbox_id).write("0", "x" * (1 << 20))
    await back(node, sandbox_id)
    assert len(_vm(node, sandbox_id).memory_layers) == 2
    assert node.process(sandbox_id).write("1", "little")
    await back(node, sandbox_id)
    assert len(_vm(node, sandbox_id).memory_layers) == 2, "the newest layer is small, and copied"
    assert node.content(sandbox_id)["1"] == "little"
    assert len(node.content(sandbox_id)["0"]) == 1 << 20
    await _rest(node)


@_WAYS
@pytest.mark.parametrize("which", ["setting", "vmm", "blockd"])
async def test_where_nothing_can_be_copied_everything_is_mapped(node: FakeNode, back: Back, which: str) -> None:
    sandbox_id = await node.create()
    if which == "setting":
        _copies_at_most(node, 0)
    elif which == "vmm":
        node.parts.vmm.fills_memory = False
    else:
        node.parts.blocks.fills_memory = False
    assert node.process(sandbox_id).write("0", "x")
    await back(node, sandbox_id)
    assert len(_vm(node, sandbox_id).memory_layers) == 2
    assert node.content(sandbox_id)["0"] == "x"
    assert "blocks.fill" not in node.points.passed
    await _rest(node)


async def test_children_and_sandboxes_of_a_snapshot_share_all_of_it(node: FakeNode) -> None:
    sandbox_id = await node.create()
    assert node.process(sandbox_id).write("0", "x")
    outcomes = await node.orchestrator.fork(sandbox_id, 2, 600)
    stacks = {_vm(node, outcome.sandbox.sandbox_id).memory_stack for outcome in outcomes if outcome.sandbox is not None}
    assert len(stacks) == 1
    assert stacks != {_vm(node, sandbox_id).memory_stack}
    assert "blocks.fill" not in node.points.passed
    await _rest(node)


@pytest.mark.parametrize("point", ["blocks.fill", "blocks.fill:done"])
async def test_a_copy_that_fails_leaves_it_as_it_was(node: FakeNode, point: str) -> None:
    sandbox_id = await node.create()
    assert node.process(sandbox_id).write("0", "kept")
    await node.orchestrator.checkpoint(sandbox_id, "a")
    assert node.process(sandbox_id).write("0", "later")
    node.points.fail(point)
    with pytest.raises(AgentEnvError):
        await node.orchestrator.rollback(sandbox_id, "a")
    assert (node.row(sandbox_id).state, node.content(sandbox_id)["0"]) == (State.RUNNING, "later")
    await node.orchestrator.pause(sandbox_id)
    node.points.fail(point)
    with pytest.raises(AgentEnvError):
        await node.orchestrator.resume(sandbox_id, 600)
    assert node.row(sandbox_id).state is State.PAUSED
    await node.orchestrator.resume(sandbox_id, 600)
    assert node.content(sandbox_id)["0"] == "later"
    await _rest(node)
