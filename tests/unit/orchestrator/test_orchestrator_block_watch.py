"""blockd ends while the server runs: what is lost says so, what can be saved is, and the next creates work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from process_ends import at_each_step
from test_orchestrator_fail_at_step import VERBS
from warming import warmed_up

from agentenv.core.errors import HostNotReady, Unavailable
from agentenv.core.lifecycle import State
from agentenv.core.model import LogQuery
from agentenv.orchestrator.block_watch import wait_ms
from agentenv.testing.fake_node import FakeNode


@pytest.fixture
async def warm_node(ram_path: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode(ram_path / "node", warm=1)
    await node.start_server()
    yield node
    await node.close()


async def said(node: FakeNode, sandbox_id: str) -> list[str]:
    return [entry.message for entry in await node.orchestrator.logs(sandbox_id, LogQuery())]


async def test_with_files_the_running_end_with_the_reason_the_paused_stay_and_creates_go_on(node: FakeNode) -> None:
    running, paused = [await node.create() for _ in range(3)], [await node.create() for _ in range(2)]
    for sandbox_id in paused:
        assert node.process(sandbox_id).write("0", sandbox_id)
        await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    node.devices.kill()
    await node.quiesce()
    for sandbox_id in running:
        row = node.row(sandbox_id)
        assert (row.state, row.reason) == (State.KILLED, "the block server ended, and the sandbox's disk with it")
    for sandbox_id in paused:
        await node.orchestrator.connect(sandbox_id, 60)
        assert node.content(sandbox_id) == {"booted": "yes", "0": sandbox_id}
    await node.create()
    await node.quiesce()
    assert node.problems() == []
    assert node.parts.shared.troubles == {}


async def test_a_disk_that_is_a_device_is_saved_when_memory_is_lost(node: FakeNode) -> None:
    node.devices.has_ublk = True
    well, hung = await node.create(), await node.create()
    assert node.process(well).write("0", "kept")
    node.process(hung).hung = True
    await node.quiesce()
    node.devices.kill()
    await node.quiesce()
    assert (node.row(well).state, node.row(well).pause_mode) == (State.PAUSED, "filesystem")
    assert node.content(well) == {"booted": "yes", "0": "kept"}
    assert "the block server ended, and the sandbox's memory with it; paused with its disk alone" in await said(node, well)
    assert node.row(hung).state is State.KILLED
    assert "its disk could not be saved" in node.row(hung).reason
    await node.orchestrator.connect(well, 60, memory=False)
    await node.quiesce()
    assert node.problems() == []


async def test_a_vm_whose_stacks_are_all_devices_goes_on(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox_id = await node.create()
    await node.quiesce()
    before = node.process(sandbox_id)
    for stack_id in (before.spec.memory.name, before.spec.disk.name):  # as with a driver that takes memory from a device
        stack = node.devices.by_id(stack_id)
        stack.path = Path("/dev") / stack_id
    node.devices.kill()
    await node.turn()
    await node.parts.shared.settle()
    assert node.row(sandbox_id).state is State.RUNNING
    assert node.process(sandbox_id) is before
    assert "the block server ended and another one has taken its disk over" in await said(node, sandbox_id)


@pytest.mark.parametrize("name", VERBS)
async def test_a_verb_under_way_fails_or_works_and_nothing_is_left_between(node: FakeNode, name: str) -> None:
    """The daemon ends at each point that the verb passes."""
    await at_each_step(node, name, node.devices.kill)


@pytest.mark.parametrize("memory", [True, False])
async def test_who_asks_for_what_was_lost_is_not_told_that_there_is_no_such_sandbox(node: FakeNode, memory: bool) -> None:
    node.devices.has_ublk = True
    sandbox_id = await node.create()
    await node.quiesce()
    with node.points.hold("blocks.capture" if memory else "blocks.seal") as reached:
        pausing = asyncio.create_task(node.orchestrator.pause(sandbox_id, memory))
        await asyncio.wait_for(reached.wait(), 5)
        node.devices.kill()
        await node.turn()  # the next one is there by then
        vm = node.row(sandbox_id).vm
        assert vm is not None
        node.devices.close(vm.memory_stack if memory else vm.disk_stack, force=True)
    with pytest.raises(Unavailable, match="was lost with the block server"):
        await pausing


async def test_those_that_stood_ready_are_made_anew(warm_node: FakeNode) -> None:
    node = warm_node
    (before,) = await warmed_up(node)
    node.devices.kill()
    for _ in range(30):
        await node.quiesce()
        if set(node.parts.shared.warm.ready) - {before}:
            break
        node.clock.advance_ms(5_000)
    assert before not in node.parts.shared.warm.ready
    assert len(node.parts.shared.warm.ready) == 1
    await node.create()
    await node.quiesce()
    assert node.problems() == []


async def test_one_that_cannot_be_started_is_tried_more_and_more_rarely_and_health_says_so(node: FakeNode) -> None:
    sandbox_id = await node.create()
    await node.quiesce()
    for _ in range(3):
        node.points.fail("blockd.start", error=HostNotReady("no FUSE", "mount it"))
    before = node.points.passed.count("blockd.start")
    node.devices.kill()
    await node.turn()
    assert node.points.passed.count("blockd.start") == before + 1
    assert "no FUSE" in node.parts.shared.troubles["blockd"]
    with pytest.raises(Unavailable):
        await node.create()
    for waited_ms, starts in ((1_000, 2), (1_000, 2), (1_000, 3), (4_000, 4)):
        node.clock.advance_ms(waited_ms)
        await node.turn()
        assert node.points.passed.count("blockd.start") == before + starts
    await node.quiesce()
    assert node.parts.shared.troubles == {}
    assert node.row(sandbox_id).state is State.KILLED
    await node.create()


async def test_one_that_never_lasts_makes_no_storm(node: FakeNode) -> None:
    begun = node.points.passed.count("blockd.start")
    for _ in range(600):  # ten minutes, in which it ends whenever it runs
        node.devices.kill()
        await node.turn()
        node.clock.advance_ms(1_000)
        await node.turn()
    assert 8 <= node.points.passed.count("blockd.start") - begun <= 20


def test_the_waits_grow_and_are_bounded() -> None:
    assert [wait_ms(failures) for failures in (0, 1, 2, 3, 7, 100)] == [0, 1_000, 2_000, 4_000, 60_000, 60_000]
