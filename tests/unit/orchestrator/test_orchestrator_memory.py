"""When the host gets short of memory: who gives way, in which order, who never does, and what a create is told (cases K03, K06, J02)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.config.limits import LimitsConfig
from agentenv.config.memory import MemoryConfig
from agentenv.core.errors import ShortOfMemory
from agentenv.core.lifecycle import State
from agentenv.core.model import LogQuery
from agentenv.host.memory import Memory
from agentenv.orchestrator.memory_watch import level
from agentenv.orchestrator.serve_volumes import life
from agentenv.testing.fake_memory import PLENTY
from agentenv.testing.fake_node import FakeNode

LIMITS = LimitsConfig(memory_reserve_mb=500, disk_reserve_mb=0)
SETTINGS = MemoryConfig(tight_mb=1000)
TIGHT = Memory(10_000, 1_400, 0.0, 0.0)
CRITICAL = Memory(10_000, 400, 0.0, 0.0)
IDLE_MS = 61_000
SECOND = 100  # ticks


@pytest.fixture
async def node(ram_path: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode(ram_path / "node", limits=LIMITS)
    node.config = node.config.model_copy(update={"memory": SETTINGS})
    await node.start_server()
    yield node
    await node.close()


def pid(node: FakeNode, sandbox_id: str) -> int:
    vm = node.row(sandbox_id).vm
    assert vm is not None
    return vm.pid


def group(node: FakeNode, sandbox_id: str) -> str:
    vm = node.row(sandbox_id).vm
    assert vm is not None
    return life(sandbox_id, vm.run_id)


async def pass_time(node: FakeNode, spent_ms: int, busy: dict[int, float] | None = None) -> None:
    """Let the watch look on; `busy` is the share of a CPU that a process uses."""
    for _ in range(spent_ms // 2_000):
        for process, share in (busy or {}).items():
            node.memory.ticks[process] = node.memory.ticks.get(process, 0) + int(2 * SECOND * share)
        node.clock.advance_ms(2_000)
        for _ in range(4):  # a pause takes some
            await node.turn()


def paused(node: FakeNode) -> set[str]:
    return {row.sandbox_id for row in node.parts.store.sandboxes() if row.state is State.PAUSED}


async def said(node: FakeNode, sandbox_id: str) -> list[str]:
    return [entry.message for entry in await node.orchestrator.logs(sandbox_id, LogQuery())]


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (PLENTY, "plenty"),
        (Memory(10_000, 1_500), "plenty"),
        (Memory(10_000, 1_499), "tight"),
        (Memory(10_000, 500), "tight"),
        (Memory(10_000, 499), "critical"),
        (Memory(10_000, 2_000, 10.0, 0.0), "tight"),
        (Memory(10_000, 2_000, 30.0, 10.0), "critical"),
        (Memory(10_000, 2_000, 9.9, 9.9), "plenty"),
        (Memory(10_000, 2_501, 90.0, 90.0), "plenty"),  # tasks of a control group with a limit of its own
        (Memory(None, None), "plenty"),
        (Memory(None, None, 0.0, 20.0), "critical"),
    ],
)
def test_how_short_of_memory_the_host_is(memory: Memory, found: str) -> None:
    assert level(memory, SETTINGS, 500) == found


async def test_first_idle_ones_give_back_and_busy_ones_do_not(node: FakeNode) -> None:
    idle, busy = await node.create(), await node.create()
    cgroups: Any = node.parts.cgroups
    work = {pid(node, busy): 0.5, pid(node, idle): 0.02}
    await pass_time(node, IDLE_MS, work)
    assert cgroups.reclaimed == []
    node.memory.memory = TIGHT
    await pass_time(node, 4_000, work)
    assert {name for name, _ in cgroups.reclaimed} == {group(node, idle)}
    assert paused(node) == set()
    assert node.parts.shared.troubles == {}
    await node.create()


async def test_then_the_one_idle_for_longest_is_paused_one_at_a_time_and_only_with_leave(node: FakeNode) -> None:
    """K06: what is done is controlled, told, and undone by its next use."""
    forbidden, unsaid = await node.create(pause_when_idle=False), await node.create()
    first = await node.create(pause_when_idle=True)
    await pass_time(node, 10_000, {pid(node, first): 0.0})
    second = await node.create(pause_when_idle=True)
    busy = await node.create(pause_when_idle=True)
    work = {pid(node, busy): 0.5}
    await pass_time(node, IDLE_MS + 2_000, work)
    node.memory.memory = CRITICAL
    await pass_time(node, 2_000, work)
    assert paused(node) == {first}
    assert "memory" in node.parts.shared.troubles
    await pass_time(node, 8_000, work)
    assert paused(node) == {first, second}
    await pass_time(node, IDLE_MS, work)
    assert paused(node) == {first, second}
    assert {node.row(one).state for one in (forbidden, unsaid, busy)} == {State.RUNNING}
    assert "paused since it was idle and the host is short of memory" in await said(node, first)
    with pytest.raises(ShortOfMemory, match="400 MiB of memory left") as refused:
        await node.create()
    assert (refused.value.status, refused.value.retryable) == (503, True)
    node.memory.memory = PLENTY
    await pass_time(node, 2_000, work)
    assert node.parts.shared.troubles == {}
    await node.orchestrator.connect(first, 60)
    await node.create()
    await node.quiesce()
    assert node.problems() == []


async def test_the_node_may_pause_those_whose_owner_said_nothing(ram_path: Path) -> None:
    node = FakeNode(ram_path / "node", limits=LIMITS)
    node.config = node.config.model_copy(update={"memory": SETTINGS.model_copy(update={"pause_idle": True})})
    await node.start_server()
    unsaid, forbidden = await node.create(), await node.create(pause_when_idle=False)
    await pass_time(node, IDLE_MS + 2_000)
    node.memory.memory = CRITICAL
    await pass_time(node, IDLE_MS)
    assert paused(node) == {unsaid}
    assert node.row(forbidden).state is State.RUNNING
    await node.close()


async def test_one_that_cannot_be_paused_is_no_reason_to_stop(node: FakeNode) -> None:
    first, second = await node.create(pause_when_idle=True), await node.create(pause_when_idle=True)
    await pass_time(node, IDLE_MS + 2_000)
    node.points.fail("blocks.capture")
    node.memory.memory = CRITICAL
    await pass_time(node, 2_000)
    assert len(paused(node)) == 1
    await pass_time(node, 10_000)
    assert paused(node) == {first, second}
    await node.quiesce()
    assert node.problems() == []


async def test_k03_what_the_kernel_does_not_tell_is_told(node: FakeNode) -> None:
    node.memory.memory = Memory(None, None, 1.0, 0.0)
    await pass_time(node, 2_000)
    assert "does not tell total_mb, available_mb" in node.parts.shared.troubles["memory"]
    await node.create()
    node.memory.memory = PLENTY
    await pass_time(node, 2_000)
    assert node.parts.shared.troubles == {}


async def test_j02_many_at_once_do_not_take_the_same_memory(node: FakeNode) -> None:
    """Each start counts those that are under way: of 16 MiB machines that may hold 4 each, three fit into 12."""
    node.memory.memory = Memory(10_000, 500 + 12)
    node.parts.shared.starting = asyncio.Semaphore(64)
    outcomes = await asyncio.gather(*(node.create() for _ in range(20)), return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, ShortOfMemory)]
    assert len(refused) + sum(isinstance(one, str) for one in outcomes) == 20
    assert 1 <= 20 - len(refused) <= 3


async def test_j02_the_sum_of_machines_is_bounded(node: FakeNode) -> None:
    node.parts.config = node.config.model_copy(update={"memory": MemoryConfig(overcommit_percent=200)})
    node.memory.memory = Memory(20, 19_000)  # 2 of 16 MiB fit into 200 % of 20
    made = [await node.create() for _ in range(2)]
    with pytest.raises(ShortOfMemory, match="over 200 % of the host's 20 MiB"):
        await node.create()
    await node.orchestrator.pause(made[0])
    await node.create()
    with pytest.raises(ShortOfMemory):
        await node.orchestrator.connect(made[0], 60)
    assert node.row(made[0]).state is State.PAUSED


async def test_a_start_is_expected_to_hold_what_others_of_its_size_do(node: FakeNode) -> None:
    made = [await node.create() for _ in range(3)]
    node.memory.memory = Memory(100_000, 500 + 39)
    await node.create()  # a quarter of its size, which is 4
    for sandbox_id in made:
        node.memory.held[pid(node, sandbox_id)] = 300
    node.memory.memory = Memory(100_000, 500 + 15)
    await pass_time(node, 2_000)
    with pytest.raises(ShortOfMemory, match="532 MiB are needed"):  # at least 32, at most its size
        await node.create()
