"""Fork: children go on from one instant, each with its own identity; the source is not harmed."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.config.schema import LimitsConfig
from agentenv.core.errors import Conflict, Internal, LimitReached, NotFound
from agentenv.core.lifecycle import State
from agentenv.testing.fake_node import FakeNode


async def _fork(node: FakeNode, sandbox_id: str, count: int) -> list[str]:
    outcomes = await node.orchestrator.fork(sandbox_id, count, 600)
    assert all(outcome.sandbox is not None for outcome in outcomes)
    return [outcome.sandbox.sandbox_id for outcome in outcomes if outcome.sandbox]


async def test_children_of_a_running_one_share_an_instant_and_then_part(node: FakeNode) -> None:
    source = await node.create(metadata={"a": "b"}, env_vars={"X": "1"}, on_timeout="pause", allow_public_traffic=False)
    assert node.process(source).write("0", "common")
    before = node.row(source)
    children = await _fork(node, source, 3)
    for child in children:
        assert node.process(child).write("1", child)
    assert node.process(source).write("2", "source")
    for child in children:
        assert node.content(child) == {"booted": "yes", "0": "common", "1": child}
        row = node.row(child)
        assert (row.metadata, row.env_vars, row.on_timeout, row.allow_public_traffic) == ({"a": "b"}, {"X": "1"}, "pause", False)
        assert row.end_at_ms == node.clock.now_ms() + 600_000
    assert node.content(source) == {"booted": "yes", "0": "common", "2": "source"}
    assert node.row(source).end_at_ms == before.end_at_ms
    assert node.points.passed.count("blocks.capture") == 1
    tokens = [t for i in (source, *children) for t in (node.row(i).access_token, node.row(i).traffic_token)]
    assert len(set(tokens)) == len(tokens) == 8
    await node.quiesce()
    assert node.problems() == []


async def test_the_source_runs_on_before_the_first_child_starts(node: FakeNode) -> None:
    source = await node.create()
    with node.points.hold("vmm.restore") as reached:
        forking = asyncio.create_task(node.orchestrator.fork(source, 2, 600))
        await reached.wait()
        assert node.process(source).running
        assert node.row(source).state is State.RUNNING
    await forking


@pytest.mark.parametrize(("paused", "captures"), [(False, 1), (True, 0)])
async def test_a_hundred_children_are_captured_once_and_start_some_at_a_time(node: FakeNode, paused: bool, captures: int) -> None:
    source = await node.create()
    if paused:
        await node.orchestrator.pause(source)
    at_once = node.config.limits.starts_at_once
    former = len(node.points.passed)
    with node.points.hold("guest.initialise") as reached:
        forking = asyncio.create_task(node.orchestrator.fork(source, 100, 600))
        await reached.wait()
        for _ in range(50):
            await node.turn()
        passed = node.points.passed[former:]
        assert passed.count("vmm.restore") == at_once, "as many starts side by side as the node may have, and no more"
        other = asyncio.create_task(node.create())
    outcomes = await forking
    assert len({outcome.sandbox.sandbox_id for outcome in outcomes if outcome.sandbox}) == 100
    assert node.points.passed[former:].count("blocks.capture") == captures
    await other
    assert len(node.processes.alive()) == 102 - paused
    await node.quiesce()
    assert node.problems() == []


async def test_a_paused_source_stays_paused_and_needs_no_vm(node: FakeNode) -> None:
    source = await node.create()
    assert node.process(source).write("0", "kept")
    await node.orchestrator.pause(source)
    children = await _fork(node, source, 4)
    assert node.row(source).state is State.PAUSED
    assert len(node.processes.alive()) == 4
    await node.orchestrator.kill(source)
    await node.quiesce()
    assert node.problems() == []
    [grandchild] = await _fork(node, children[0], 1)
    assert node.content(grandchild) == {"booted": "yes", "0": "kept"}


async def test_a_tree_of_forks_shares_no_slot_and_survives_its_members(node: FakeNode) -> None:
    generation = [await node.create()]
    for depth in range(3):
        children = [child for parent in generation for child in await _fork(node, parent, 2)]
        for child in children:
            assert node.process(child).write(str(depth), child)
        await node.orchestrator.kill(generation[0])
        await node.quiesce()
        assert node.problems() == []
        generation = children
    for sandbox_id in generation:
        await node.orchestrator.pause(sandbox_id)
        await node.orchestrator.resume(sandbox_id, 600)
    await node.quiesce()
    assert node.problems() == []


async def test_a_source_killed_while_its_children_start_does_not_take_their_layers(node: FakeNode) -> None:
    source = await node.create()
    await node.orchestrator.pause(source)
    with node.points.hold("slots.acquire") as reached:
        forking = asyncio.create_task(node.orchestrator.fork(source, 2, 600))
        await reached.wait()
        await node.orchestrator.kill(source)
        node.clock.advance_ms(1000)
        await node.turn()  # the sweep after the kill
    outcomes = await forking
    assert all(outcome.sandbox for outcome in outcomes)
    await node.quiesce()
    assert node.problems() == []


async def test_each_child_has_its_own_outcome_when_the_node_gets_full(node: FakeNode) -> None:
    node.parts.config = node.config.model_copy(update={"limits": LimitsConfig(sandboxes_running=7, memory_reserve_mb=0, disk_reserve_mb=0)})
    source = await node.create()
    end_at_ms = node.row(source).end_at_ms
    outcomes = await node.orchestrator.fork(source, 10, 600)
    assert [outcome.error_status for outcome in outcomes if outcome.sandbox is None] == [429] * 4
    assert len([outcome for outcome in outcomes if outcome.sandbox]) == 6
    assert (node.row(source).state, node.row(source).end_at_ms) == (State.RUNNING, end_at_ms)
    with pytest.raises(LimitReached):
        await node.orchestrator.fork(source, 1, 600)
    with pytest.raises(LimitReached):
        await node.create()
    await node.quiesce()
    assert node.problems() == []


async def test_the_limit_holds_against_a_burst(node: FakeNode) -> None:
    node.parts.config = node.config.model_copy(update={"limits": LimitsConfig(sandboxes_running=5, memory_reserve_mb=0, disk_reserve_mb=0)})
    outcomes = await asyncio.gather(*(node.create() for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(outcome, str) for outcome in outcomes) == 5
    assert sum(isinstance(outcome, LimitReached) for outcome in outcomes) == 15


async def test_one_childs_failure_is_its_own(node: FakeNode) -> None:
    source = await node.create()
    node.points.fail("vmm.restore", at=2, error=Internal("injected"))
    outcomes = await node.orchestrator.fork(source, 3, 600)
    assert sorted(outcome.error_status for outcome in outcomes) == [0, 0, 500]
    assert [outcome.error_message for outcome in outcomes if outcome.sandbox is None] == ["injected"]
    await node.quiesce()
    assert node.problems() == []


async def test_what_is_gone_or_changing_cannot_be_forked(node: FakeNode) -> None:
    source = await node.create()
    node.processes.end(node.process(source))
    with pytest.raises((NotFound, Conflict)):
        await node.orchestrator.fork(source, 1, 600)
    await node.quiesce()
    with pytest.raises(NotFound):
        await node.orchestrator.fork(source, 1, 600)
    with pytest.raises(NotFound):
        await node.orchestrator.fork("inothere", 1, 600)
