"""VMs that stand ready: creates wake them, each becomes one sandbox only, and none is left when nobody wants them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.core.errors import StorageFull
from agentenv.core.lifecycle import State
from agentenv.core.network import OPEN, NetworkSettings
from agentenv.testing.fake_node import TEMPLATE, FakeNode


@pytest.fixture
async def node(ram_path: Path) -> AsyncIterator[FakeNode]:
    """A node that keeps two VMs ready of each template in use."""
    made = FakeNode(ram_path / "node", warm=2)
    await made.start_server()
    yield made
    await made.close()


def _ready(node: FakeNode) -> list[str]:
    return list(node.parts.shared.warm.ready)


async def _rest(node: FakeNode) -> None:
    """Some seconds later, when the keeper has looked again."""
    for _ in range(28):
        node.clock.advance_ms(250)
        await node.turn()
    await node.quiesce()
    assert node.problems() == []


async def _used(node: FakeNode, template: str = TEMPLATE) -> None:
    """A sandbox of it was created, and is gone."""
    await node.orchestrator.kill(await node.create(template=template))


async def _warmed(node: FakeNode) -> None:
    for _ in range(2):
        await _used(node)
    await _rest(node)
    assert len(_ready(node)) == 2


async def test_none_is_made_before_a_template_is_used(node: FakeNode) -> None:
    node.clock.advance_ms(60_000)
    await _rest(node)
    assert node.processes.alive() == []


async def test_a_template_that_was_used_once_has_none_until_it_is_used_again(node: FakeNode) -> None:
    await _used(node)
    await _rest(node)
    assert _ready(node) == []
    node.clock.advance_ms(1000 * node.config.warm.idle_s)
    await _rest(node)
    await _used(node)  # so much later that it is a first use again
    await _rest(node)
    assert _ready(node) == []
    await _used(node)
    await _rest(node)
    assert len(_ready(node)) == 2


async def test_a_create_takes_one_and_another_is_made(node: FakeNode) -> None:
    await _warmed(node)
    ready, restores = _ready(node), node.points.passed.count("vmm.restore")
    for _ in range(5):
        sandbox_id = await node.create(metadata={"a": "b"}, env_vars={"X": "1"})
        assert sandbox_id in ready
        identity = node.process(sandbox_id).identity
        assert identity is not None
        assert (identity.sandbox_id, identity.access_token, identity.env_vars) == (
            sandbox_id,
            node.row(sandbox_id).access_token,
            {"X": "1"},
        )
        assert node.content(sandbox_id) == {"booted": "yes"}
        assert node.process(sandbox_id).write("0", sandbox_id)
        await _rest(node)
        ready = _ready(node)
        assert len(ready) == 2
    assert node.points.passed.count("vmm.restore") == restores + 5
    for row in node.parts.store.sandboxes():
        if row.state is State.RUNNING:
            assert node.content(row.sandbox_id)["0"] == row.sandbox_id
            await node.orchestrator.pause(row.sandbox_id)
            await node.orchestrator.resume(row.sandbox_id, 600)
            assert node.content(row.sandbox_id)["0"] == row.sandbox_id
    await _rest(node)


async def test_many_at_once_take_what_there_is(node: FakeNode) -> None:
    await _warmed(node)
    ready = set(_ready(node))
    made = await asyncio.gather(*(node.create() for _ in range(8)))
    assert len(set(made)) == 8
    assert ready <= set(made)
    await _rest(node)


async def test_it_reaches_nothing_until_it_is_taken_and_then_what_its_sandbox_may(node: FakeNode) -> None:
    await _warmed(node)
    with node.points.hold("guest.execute") as reached:
        sandbox_id = await node.create(allow_internet_access=False, network=NetworkSettings(deny_out=("10.0.0.0/8",)))
        making = asyncio.create_task(_rest_when(node, reached))
        await reached.wait()
        [record] = node.parts.shared.warm.making.values()
        assert node.network.egress[record.slot].deny, "a guest that is nobody's yet has a network"
    await making
    row = node.row(sandbox_id)
    assert row.vm is not None
    assert node.network.egress[row.vm.slot] == row.egress != OPEN
    open_one = node.row(await node.create())
    assert open_one.vm is not None
    assert open_one.vm.slot not in node.network.egress
    await _rest(node)


async def _rest_when(node: FakeNode, reached: asyncio.Event) -> None:
    while not reached.is_set():
        node.clock.advance_ms(250)
        await node.turn()
    await _rest(node)


@pytest.mark.parametrize("took_ms", [40, 1_500, 4_000])
async def test_none_is_made_while_a_create_is_under_way_nor_before_its_first_commands_are_through(node: FakeNode, took_ms: int) -> None:
    await _used(node)
    with node.points.hold("guest.initialise") as reached:
        creating = asyncio.create_task(node.create())
        await reached.wait()
        assert await _made_within(node, took_ms) is None
    await creating
    quiet_ms = min(max(200, 3 * took_ms), 10_000)
    assert await _made_within(node, quiet_ms - 20) is None, "the machine is still busy with the one that was created"
    assert await _made_within(node, 500) is not None
    await _rest(node)
    assert len(_ready(node)) == 2


async def _made_within(node: FakeNode, wait_ms: int) -> int | None:
    """After how many milliseconds one is being made, if any is in that time."""
    for passed_ms in range(0, wait_ms, 20):
        if node.parts.shared.warm.making or node.parts.shared.warm.ready:
            return passed_ms
        node.clock.advance_ms(20)
        await node.turn()
    return None


@pytest.mark.parametrize("point", ["vm.resume", "guest.initialise", "slots.apply"])
async def test_one_that_is_of_no_use_is_replaced_without_a_word(node: FakeNode, point: str) -> None:
    await _warmed(node)
    node.points.fail(point, at=1, error=StorageFull("broken"))
    sandbox_id = await node.create(allow_internet_access=False)
    assert node.points.failed == [point]
    assert node.row(sandbox_id).state is State.RUNNING
    await _rest(node)


async def test_one_that_died_while_it_stood_there_is_replaced(node: FakeNode) -> None:
    await _warmed(node)
    for process in node.processes.alive():
        node.processes.end(process)
    sandbox_id = await node.create()
    assert node.process(sandbox_id).write("0", "lives")
    await node.orchestrator.kill(sandbox_id)
    for warm in _ready(node):  # the other one is dead, too, and is found when it is taken
        await node.orchestrator.kill(await node.create())
        assert warm not in _ready(node)
    await _rest(node)


async def test_volumes_get_a_vm_of_their_own(node: FakeNode) -> None:
    await _warmed(node)
    await node.parts.volumes.create("data")
    ready = _ready(node)
    assert await node.create(volume_mounts=(("data", "/data"),)) not in ready
    assert _ready(node) == ready
    await _rest(node)


async def test_they_go_when_their_template_is_not_used_or_gone(node: FakeNode) -> None:
    source = await node.create()
    await node.orchestrator.snapshot(source, "mine")
    await _used(node)
    await _used(node, "mine")
    made = await node.create(template="mine")
    await _rest(node)
    assert len(_ready(node)) == 4
    for sandbox_id in (source, made):
        await node.orchestrator.kill(sandbox_id)
    await node.orchestrator.delete_template("mine")
    await _rest(node)
    assert len(_ready(node)) == 2
    node.clock.advance_ms(1000 * node.config.warm.idle_s)
    await _rest(node)
    assert node.processes.alive() == []
    base = node.parts.store.snapshot((await node.orchestrator.template("base")).builds[0].snapshot_id)
    assert {node.parts.layers.id_of(path) for path in node.parts.layers.files()} == {*base.memory_layers, *base.disk_layers}


async def test_what_those_that_go_have_written_goes_with_them(node: FakeNode) -> None:
    """By itself, soon after: nobody may end a sandbox for long."""
    await _warmed(node)
    before = len(node.parts.layers.files())
    node.clock.advance_ms(1000 * node.config.warm.idle_s)
    for _ in range(28):
        node.clock.advance_ms(250)
        await node.turn()
    assert (_ready(node), node.processes.alive()) == ([], [])
    assert len(node.parts.layers.files()) < before
    assert node.problems() == []


async def test_all_together_stay_within_the_budget(node: FakeNode) -> None:
    node.parts.config = node.config.model_copy(update={"warm": node.config.warm.model_copy(update={"sandboxes": 9, "memory_mb": 12})})
    await _used(node)
    await node.create()
    await _rest(node)
    assert len(_ready(node)) == 3, "4 MiB for each guest of 16"


async def test_the_end_of_a_server_leaves_none(node: FakeNode) -> None:
    await _warmed(node)
    await node.orchestrator.close()
    assert node.processes.alive() == []
    assert node.parts.shared.warm.records() == []


async def test_a_killed_server_leaves_none_to_the_next(node: FakeNode) -> None:
    await _warmed(node)
    node.kill_server()
    await node.start_server()
    await _rest(node)
    assert node.processes.alive() == []
    await _warmed(node)


async def test_a_template_that_cannot_be_started_in_advance_stops_nothing(node: FakeNode) -> None:
    await _used(node)
    made = await node.create()
    node.points.fail("vmm.restore", at=1, error=StorageFull("broken"))
    await _rest(node)
    await _rest(node)
    assert _ready(node) == []
    node.points.clear()
    node.clock.advance_ms(61_000)
    await _rest(node)
    assert len(_ready(node)) == 2
    assert node.row(made).state is State.RUNNING


@pytest.mark.parametrize("end", ["a full disk", "a bug", "a killed server"])
async def test_whatever_fails_at_any_step_of_taking_and_making(ram_path: Path, end: str) -> None:
    for step in range(1, 120):
        node = FakeNode(ram_path / str(step), warm=1)
        await node.start_server()
        await node.orchestrator.kill(await node.create())
        await _rest(node)
        passed = len(node.points.passed)
        if end != "a killed server":
            node.points.fail("*", at=step, error=StorageFull("injected") if end == "a full disk" else ZeroDivisionError("injected"))
        creating = asyncio.create_task(node.create())
        for _ in range(60):
            if end == "a killed server" and len(node.points.passed) >= passed + step:
                break
            node.clock.advance_ms(50)
            await asyncio.sleep(0)
        reached = bool(node.points.failed) or len(node.points.passed) >= passed + step
        if end == "a killed server":
            node.kill_server()
            await node.start_server()
            creating.cancel()
        else:
            await asyncio.gather(creating, return_exceptions=True)
            node.points.clear()
        await node.quiesce()
        await _rest(node)
        await node.orchestrator.kill(await node.create())
        await _rest(node)
        await node.close()
        if not reached:
            assert step > 10
            return
    pytest.fail("more steps than this test goes through")
