"""Timeouts: the node acts on them by the sandbox's own policy, and never against an extension it has confirmed."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.core.errors import NotFound, StorageFull
from agentenv.core.lifecycle import State
from agentenv.core.model import LogQuery
from agentenv.testing.fake_node import FakeNode


@pytest.mark.parametrize(("policy", "state"), [("kill", State.KILLED), ("pause", State.PAUSED)])
async def test_the_policy_is_applied_at_the_timeout_and_not_before(node: FakeNode, policy: str, state: State) -> None:
    sandbox_id = await node.create(60, on_timeout=policy)
    node.clock.advance_ms(59_999)
    await node.turn()
    assert node.row(sandbox_id).state is State.RUNNING
    node.clock.advance_ms(1)
    await node.quiesce()
    assert node.row(sandbox_id).state is state
    assert node.problems() == []


async def test_the_clock_starts_when_the_sandbox_is_usable(node: FakeNode) -> None:
    with node.points.hold("guest.initialise") as reached:
        creating = asyncio.create_task(node.create(60))
        await reached.wait()
        node.clock.advance_ms(90_000)
    row = node.row(await creating)
    assert (row.started_at_ms, row.end_at_ms) == (node.clock.now_ms(), node.clock.now_ms() + 60_000)


@pytest.mark.parametrize("policy", ["kill", "pause"])
@pytest.mark.parametrize("extend", ["connect", "set_timeout", "refresh"])
async def test_an_extension_that_was_confirmed_holds_against_an_expiry_under_way(node: FakeNode, policy: str, extend: str) -> None:
    """The evictor has seen the timeout pass and waits for its turn; the extension is ahead of it."""
    sandbox_id = await node.create(60, on_timeout=policy)
    async with node.parts.shared.locked(sandbox_id):  # some other verb
        extending = asyncio.create_task(_extend(node, extend, sandbox_id))
        await node.turn()
        node.clock.advance_ms(60_000)
        await node.turn()
        assert sandbox_id in node.parts.shared.expiring
    await extending
    await node.quiesce()
    row = node.row(sandbox_id)
    assert (row.state, row.end_at_ms > node.clock.now_ms()) == (State.RUNNING, True)


async def _extend(node: FakeNode, how: str, sandbox_id: str) -> None:
    if how == "connect":
        await node.orchestrator.connect(sandbox_id, 600)
    elif how == "set_timeout":
        await node.orchestrator.set_timeout(sandbox_id, 600)
    else:
        await node.orchestrator.refresh(sandbox_id, 600)


async def test_a_thousand_extensions_around_the_expiry_either_hold_or_say_not_found(node: FakeNode) -> None:
    ids = [await node.create(60) for _ in range(40)]
    confirmed: set[str] = set()

    async def extend(number: int, sandbox_id: str) -> None:
        for _ in range(number):
            await asyncio.sleep(0)
        try:
            await node.orchestrator.set_timeout(sandbox_id, 3600)
            confirmed.add(sandbox_id)
        except NotFound:
            pass

    tasks = [asyncio.create_task(extend(number, sandbox_id)) for number, sandbox_id in enumerate(ids)]
    for _ in range(10):
        await asyncio.sleep(0)
    node.clock.advance_ms(60_000)
    await asyncio.gather(*tasks)
    await node.quiesce()
    assert 0 < len(confirmed) < len(ids), "the test met one side only"
    assert {i for i in ids if node.row(i).state is State.RUNNING} == confirmed
    assert node.problems() == []


async def test_connect_never_shortens_and_set_timeout_may(node: FakeNode) -> None:
    sandbox_id = await node.create(1800)
    before = node.row(sandbox_id).end_at_ms
    connected, resumed = await node.orchestrator.connect(sandbox_id, 300)
    assert (connected.end_at_ms, resumed) == (before, False)
    await node.orchestrator.set_timeout(sandbox_id, 60)
    assert node.row(sandbox_id).end_at_ms == node.clock.now_ms() + 60_000
    await node.orchestrator.pause(sandbox_id)
    connected, resumed = await node.orchestrator.connect(sandbox_id, 300)
    assert (connected.end_at_ms, resumed) == (node.clock.now_ms() + 300_000, True)


async def test_the_policy_outlives_connect_fork_and_restart(node: FakeNode) -> None:
    sandbox_id = await node.create(60, on_timeout="pause")
    await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.connect(sandbox_id, 60)
    [outcome] = await node.orchestrator.fork(sandbox_id, 1, 60)
    assert outcome.sandbox is not None
    node.kill_server()
    await node.start_server()
    node.clock.advance_ms(60_000)
    await node.quiesce()
    assert [node.row(i).state for i in (sandbox_id, outcome.sandbox.sandbox_id)] == [State.PAUSED, State.PAUSED]


async def test_timeouts_that_passed_while_the_server_was_down_are_acted_on(node: FakeNode) -> None:
    sandbox_id = await node.create(60)
    node.kill_server()
    node.clock.advance_ms(120_000)
    await node.start_server()
    await node.quiesce()
    assert node.row(sandbox_id).state is State.KILLED
    assert node.row(sandbox_id).reason == "its timeout was reached"


@pytest.mark.parametrize(("policy", "state"), [("kill", State.KILLED), ("pause", State.PAUSED)])
async def test_a_timeout_of_zero_acts_before_the_answer(node: FakeNode, policy: str, state: State) -> None:
    sandbox_id = await node.create(60, on_timeout=policy)
    await node.orchestrator.set_timeout(sandbox_id, 0)
    assert node.row(sandbox_id).state is state


async def test_a_timeout_of_zero_that_cannot_be_acted_on_says_so_and_is_tried_again(node: FakeNode) -> None:
    sandbox_id = await node.create(60, on_timeout="pause")
    node.points.fail("blocks.capture", error=StorageFull("full"))
    node.points.fail("blocks.capture", error=StorageFull("full"))
    with pytest.raises(StorageFull):
        await node.orchestrator.set_timeout(sandbox_id, 0)
    await node.turn()
    assert node.row(sandbox_id).state is State.RUNNING
    captures = node.points.passed.count("blocks.capture")
    for _ in range(20):
        await node.turn()
    assert node.points.passed.count("blocks.capture") <= max(captures, 2), "a failed pause is tried again without a breath"
    node.clock.advance_ms(10_000)
    await node.quiesce()
    assert node.row(sandbox_id).state is State.PAUSED


async def test_failures_of_the_database_do_not_end_the_timeouts(node: FakeNode) -> None:
    old, first, second = await node.create(), await node.create(3660), await node.create(3720)
    await node.orchestrator.kill(old)
    await node.quiesce()
    for _ in range(30):
        node.points.fail("store.commit", error=StorageFull("full"))
    node.clock.advance_ms(3_600_001)  # the row of `old` is to be forgotten
    await node.turn()
    node.clock.advance_ms(120_000)
    await node.turn()
    assert node.row(old).state is State.KILLED
    assert [node.row(i).state for i in (first, second)] == [State.RUNNING, State.RUNNING], "the test did not make them fail"
    node.points.clear()
    node.clock.advance_ms(20_000)
    await node.quiesce()
    assert [node.row(i).state for i in (first, second)] == [State.KILLED, State.KILLED]
    assert node.parts.store.sandbox(old) is None


async def test_rows_of_killed_sandboxes_are_forgotten_after_their_time(node: FakeNode) -> None:
    sandbox_id = await node.create()
    await node.orchestrator.kill(sandbox_id)
    assert [e.message for e in await node.orchestrator.logs(sandbox_id, LogQuery())] == ["started", "ended"]
    node.clock.advance_ms(3_600_000 + 1)
    await node.quiesce()
    assert node.parts.store.sandbox(sandbox_id) is None
    with pytest.raises(NotFound):
        await node.orchestrator.logs(sandbox_id, LogQuery())
