"""VMs that stand still since the node's disk is full: what gives way, who waits, and who goes on."""

from __future__ import annotations

import asyncio

import pytest
from test_orchestrator_collect import add_step, cached

from agentenv.core.errors import Internal
from agentenv.core.lifecycle import State
from agentenv.core.model import Context, LogQuery, Machine
from agentenv.guest.commands import Command
from agentenv.orchestrator.workshop import VmWorkshop
from agentenv.testing.fake_node import TEMPLATE, FakeNode

MIB = 1 << 20


async def look(node: FakeNode, times: int = 1) -> None:
    """Let the keeper look."""
    for _ in range(times):
        node.clock.advance_ms(5_000)
        await node.turn()


async def goes_on(node: FakeNode, sandbox_id: str) -> bool:
    """Whether the VM does so in the time that making room takes: caches are looked through in threads."""
    for _ in range(1000):
        if not node.process(sandbox_id).stalled:
            return True
        await asyncio.sleep(0.01)
    return False


def fill(node: FakeNode) -> None:
    node.disk_bytes = node.disk_use().used_bytes + MIB


async def said(node: FakeNode, sandbox_id: str) -> list[str]:
    messages = [entry.message for entry in await node.orchestrator.logs(sandbox_id, LogQuery())]
    return [message for message in messages if "still" in message or "goes on:" in message]


async def test_caches_give_way_to_a_vm_that_stands_still(node: FakeNode) -> None:
    sandbox_id = await node.create()
    await add_step(node, "step", 1, ("step-layer", 20_000))
    fill(node)
    node.process(sandbox_id).stalled = True
    await look(node)
    assert await goes_on(node, sandbox_id)
    assert cached(node) == set()
    await node.quiesce()
    assert node.problems() == []


async def test_without_anything_to_give_it_waits_and_says_so_once(node: FakeNode) -> None:
    sandbox_id = await node.create()
    fill(node)
    node.process(sandbox_id).stalled = True
    await look(node, times=4)
    assert node.process(sandbox_id).stalled
    assert await said(node, sandbox_id) == ["stands still: the node's disk is full; it goes on when there is room"]
    node.disk_bytes += 100 * MIB
    await look(node)
    assert not node.process(sandbox_id).stalled
    assert (await said(node, sandbox_id))[1:] == ["goes on: there is room on the node's disk again"]
    assert node.row(sandbox_id).state is State.RUNNING


async def test_a_build_ends_rather_than_to_wait_and_says_why(node: FakeNode) -> None:
    workshop = VmWorkshop(node.parts)
    bench = await workshop.open("a build", workshop.base(TEMPLATE).snapshot_id, Machine(1, 16, 64), Context(), cold=True, life_s=3600)
    sandbox_id = bench.sandbox_id  # type: ignore[attr-defined]
    with node.points.hold("guest.execute"):  # its connection hears nothing of the end
        running = asyncio.ensure_future(bench.run(Command(("true",)), lambda *_: None, 3600))
        await node.turn()
        fill(node)
        node.process(sandbox_id).stalled = True
        await look(node, times=2)
        assert (node.row(sandbox_id).state, node.processes.alive()) == (State.KILLED, [])
        with pytest.raises(Internal, match="the build's VM has ended: the node's disk is full"):
            await running
    with pytest.raises(Internal, match="the build's VM has ended: the node's disk is full"):
        await bench.run(Command(("true",)), lambda *_: None, 60)
    await bench.close()
    await node.quiesce()
    assert node.problems() == []
