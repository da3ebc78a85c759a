"""The node's disk gets full under VMMs that would pass that on to their guests: who writes stands still in time, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.config.limits import LimitsConfig
from agentenv.core.lifecycle import State
from agentenv.core.model import LogQuery
from agentenv.orchestrator import start
from agentenv.testing.fake_node import FakeNode

MIB = 1 << 20
RESERVE_MB = 64
STANDS, GOES_ON = "stands still: the node's disk is full; it goes on when there is room", "goes on: there is room on the node's disk again"


def make(folder: Path, *, writes_memory: bool) -> FakeNode:
    limits = LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=RESERVE_MB)
    return FakeNode(folder / "node", limits=limits, writes_memory=writes_memory)


@pytest.fixture
async def passing_on(ram_path: Path) -> AsyncIterator[FakeNode]:
    node = make(ram_path, writes_memory=True)
    await node.start_server()
    yield node
    await node.close()


def leave(node: FakeNode, free_mb: int) -> None:
    node.disk_bytes = node.disk_use().used_bytes + free_mb * MIB


async def look(node: FakeNode, writers: tuple[str, ...] = (), times: int = 3) -> None:
    """Let the watch look while some guests write."""
    for time in range(times):
        for sandbox_id in writers:
            node.process(sandbox_id).write(f"{node.clock.now_ms()} {time}", "x" * 64)
        node.clock.advance_ms(2_000)
        await node.turn()


async def said(node: FakeNode, sandbox_id: str) -> list[str]:
    messages = [entry.message for entry in await node.orchestrator.logs(sandbox_id, LogQuery())]
    return [message for message in messages if message in (STANDS, GOES_ON)]


async def test_who_writes_stands_still_and_goes_on_when_there_is_room(passing_on: FakeNode) -> None:
    node = passing_on
    writes, rests = await node.create(), await node.create()
    leave(node, RESERVE_MB + 1)
    await look(node, (writes,))
    assert node.process(writes).running
    assert node.parts.shared.troubles == {}
    leave(node, RESERVE_MB - 1)
    await look(node, (writes,), times=6)
    assert (node.process(writes).running, node.process(rests).running) == (False, True)
    assert "limits.disk_reserve_mb" in node.parts.shared.troubles["disk"]
    assert await said(node, writes) == [STANDS]
    leave(node, RESERVE_MB + 1)  # it would be gone again at the next write
    await look(node, times=4)
    assert not node.process(writes).running
    leave(node, 4 * RESERVE_MB)
    await look(node, times=4)
    assert node.process(writes).running
    assert await said(node, writes) == [STANDS, GOES_ON]
    assert (await said(node, rests), node.row(writes).state) == ([], State.RUNNING)
    assert node.parts.shared.troubles == {}
    await node.orchestrator.pause(writes)
    await node.quiesce()
    assert node.problems() == []


async def test_one_whose_vmm_waits_by_itself_is_left_to_it(ram_path: Path) -> None:
    node = make(ram_path, writes_memory=False)
    await node.start_server()
    sandbox_id = await node.create()
    leave(node, RESERVE_MB - 1)
    await look(node, (sandbox_id,), times=6)
    assert node.process(sandbox_id).running
    assert "disk" in node.parts.shared.troubles
    await node.close()


async def test_one_that_stands_still_goes_on_under_the_next_server(passing_on: FakeNode) -> None:
    node = passing_on
    sandbox_id = await node.create()
    leave(node, RESERVE_MB - 1)
    await look(node, (sandbox_id,), times=6)
    assert not node.process(sandbox_id).running
    node.kill_server()
    await node.start_server()
    leave(node, 4 * RESERVE_MB)
    await look(node, times=4)
    assert node.process(sandbox_id).running
    await node.orchestrator.kill(sandbox_id)
    await node.quiesce()
    assert node.problems() == []


@pytest.mark.parametrize("point", ["vm.pause", "vm.stalled", "blocks.stacks"])
async def test_a_look_that_fails_is_followed_by_another(passing_on: FakeNode, point: str) -> None:
    node = passing_on
    sandbox_id = await node.create()
    await look(node)
    node.points.fail(point)
    leave(node, RESERVE_MB - 1)
    await look(node, (sandbox_id,), times=8)
    assert node.points.failed == [point]
    assert not node.process(sandbox_id).running


async def test_a_verb_at_work_is_not_waited_for(passing_on: FakeNode) -> None:
    node = passing_on
    busy, writes = await node.create(), await node.create()
    leave(node, RESERVE_MB - 1)
    async with node.parts.shared.locked(busy):
        await look(node, (busy, writes), times=4)
        assert (node.process(busy).running, node.process(writes).running) == (True, False)
    await look(node, (busy,), times=4)
    assert not node.process(busy).running


async def test_one_whose_vmm_waits_for_its_device_can_be_killed(passing_on: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The VMM hangs in the kernel until its write is answered, which the end of its device does."""
    node = passing_on
    monkeypatch.setattr(start, "_KILL_GRACE_S", 0.01)
    sandbox_id = await node.create()
    disk = node.row(sandbox_id).vm.disk_stack  # type: ignore[union-attr]
    with node.points.hold("vm.kill"):
        kill = asyncio.ensure_future(node.orchestrator.kill(sandbox_id))
        for _ in range(1000):
            if disk not in node.devices.stack_ids:
                break
            await asyncio.sleep(0.01)
        assert (disk in node.devices.stack_ids, kill.done()) == (False, False)
    await kill
    await node.quiesce()
    assert node.problems() == []


async def test_one_whose_write_is_kept_by_the_block_server_is_not_asked_and_goes_on_by_itself(passing_on: FakeNode) -> None:
    node = passing_on
    sandbox_id = await node.create()
    await look(node)
    disk = node.devices.by_id(node.row(sandbox_id).vm.disk_stack)  # type: ignore[union-attr]
    disk.waits_for_room = True
    leave(node, RESERVE_MB - 1)
    with node.points.hold("vm.stalled"), node.points.hold("vm.pause"):  # its VMM waits for the write
        await look(node, (sandbox_id,), times=6)
        assert await said(node, sandbox_id) == [STANDS]
        assert not node.parts.shared.is_locked(sandbox_id)
    disk.waits_for_room = False
    leave(node, 4 * RESERVE_MB)
    await look(node, times=4)
    assert await said(node, sandbox_id) == [STANDS, GOES_ON]
    assert node.process(sandbox_id).running
