"""Every pair of calls that meet at one sandbox, as docs/lifecycle.md says: the first is held half-way while the second comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentenv.core.errors import AgentEnvError, StorageFull
from agentenv.core.lifecycle import State
from agentenv.core.meetings import OUTCOMES, meeting
from agentenv.core.network import NetworkSettings
from agentenv.testing.fake_node import FakeNode

_TIMEOUT_S, _LONGER_S = 600, 3600
_TIMEOUTS = {"timeout (kill)", "timeout (pause)"}  # nobody asks for them: what they do is seen, and no answer
_ALONE = {("traffic", State.RUNNING)}  # it changes nothing, so there is nothing in which it could be held


async def _time_is_up(node: FakeNode, sandbox_id: str) -> None:
    """Its time passes; the node has come to it when this returns."""
    node.clock.advance_ms(1000 * (_TIMEOUT_S + 1))
    node.parts.shared.expiry_changed.set()
    await node.turn()
    async with node.parts.shared.locked(sandbox_id):  # behind it, if it waits for its turn
        pass


VERBS: dict[str, Callable[[FakeNode, str], Awaitable[object]]] = {
    "pause": lambda node, sandbox_id: node.orchestrator.pause(sandbox_id),
    "resume": lambda node, sandbox_id: node.orchestrator.resume(sandbox_id, _LONGER_S),
    "connect": lambda node, sandbox_id: node.orchestrator.connect(sandbox_id, _LONGER_S),
    "traffic": lambda node, sandbox_id: node.orchestrator.wake(sandbox_id, _LONGER_S),
    "set timeout": lambda node, sandbox_id: node.orchestrator.set_timeout(sandbox_id, _LONGER_S),
    "refresh": lambda node, sandbox_id: node.orchestrator.refresh(sandbox_id, _LONGER_S),
    "fork": lambda node, sandbox_id: node.orchestrator.fork(sandbox_id, 1, _LONGER_S),
    "snapshot": lambda node, sandbox_id: node.orchestrator.snapshot(sandbox_id, None),
    "checkpoint": lambda node, sandbox_id: node.orchestrator.checkpoint(sandbox_id, ""),
    "rollback": lambda node, sandbox_id: node.orchestrator.rollback(sandbox_id),
    "set network": lambda node, sandbox_id: node.orchestrator.set_network(sandbox_id, NetworkSettings(), False),
    "kill": lambda node, sandbox_id: node.orchestrator.kill(sandbox_id),
    "timeout (kill)": _time_is_up,
    "timeout (pause)": _time_is_up,
}


def test_the_table_has_every_verb() -> None:
    assert VERBS.keys() == OUTCOMES.keys()
    assert all(outcomes.keys() == {State.RUNNING, State.PAUSED, State.KILLED} for outcomes in OUTCOMES.values())


async def _prepared(folder: Path, found: State, *verbs: str) -> tuple[FakeNode, str]:
    node = FakeNode(folder)
    await node.start_server()
    policy = "pause" if "timeout (pause)" in verbs else "kill"
    sandbox_id = await node.create(_TIMEOUT_S, on_timeout=policy, auto_resume=True)
    await node.orchestrator.checkpoint(sandbox_id, "start")
    if found is State.PAUSED:
        await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    return node, sandbox_id


async def _asked(node: FakeNode, sandbox_id: str, verb: str) -> str:
    try:
        await VERBS[verb](node, sandbox_id)
    except AgentEnvError as error:
        return str(error.status)
    return "done"


async def _meet(node: FakeNode, sandbox_id: str, first: str, second: str, error: Exception | None) -> tuple[str, str, bool]:
    """The answers of both, and whether the second came while the first had the sandbox. `error`: the first fails then."""
    with node.points.hold("store.commit") as reached:
        one = asyncio.create_task(_asked(node, sandbox_id, first))
        for _ in range(200):
            if reached.is_set() or one.done():
                break
            await asyncio.sleep(0)
        is_held = node.parts.shared.is_locked(sandbox_id)
        two = asyncio.create_task(_asked(node, sandbox_id, second))
        await node.turn()
        if is_held and second not in _TIMEOUTS:
            assert not two.done(), f"{second} did not wait for {first}"
        if error is not None and is_held:
            node.points.fail("store.commit", error=error)
    return await one, await two, is_held


async def _end_of(node: FakeNode, sandbox_id: str) -> State:
    await node.quiesce()
    assert node.problems() == []
    return node.row(sandbox_id).state


@pytest.mark.parametrize("found", [State.RUNNING, State.PAUSED])
@pytest.mark.parametrize("first", OUTCOMES)
async def test_the_second_call_meets_what_the_first_has_left(ram_path: Path, first: str, found: State) -> None:
    for number, second in enumerate(OUTCOMES):
        if {first, second} == _TIMEOUTS:
            continue  # a sandbox has one policy
        node, sandbox_id = await _prepared(ram_path / str(number), found, first, second)
        answers = await _meet(node, sandbox_id, first, second, None)
        expected = meeting(found, first, second)
        assert first in _TIMEOUTS or answers[0] == OUTCOMES[first][found].answer, f"{first}, then {second}"
        assert second in _TIMEOUTS or answers[1] == expected.answer, f"{first}, then {second}"
        assert await _end_of(node, sandbox_id) is expected.then, f"{first}, then {second}"
        await node.close()


@pytest.mark.parametrize(
    ("first", "found"),
    [
        (first, found)
        for first, outcomes in OUTCOMES.items()
        for found in (State.RUNNING, State.PAUSED)
        if outcomes[found].answer == "done" and first not in {"kill", *_TIMEOUTS} and (first, found) not in _ALONE
    ],
)
async def test_after_a_first_that_fails_the_second_meets_what_there_was(ram_path: Path, first: str, found: State) -> None:
    for number, second in enumerate(OUTCOMES):
        node, sandbox_id = await _prepared(ram_path / str(number), found, first, second)
        answer, then, is_held = await _meet(node, sandbox_id, first, second, StorageFull("no room"))
        assert is_held or found is State.PAUSED, f"{first} could not be held"  # the snapshot of a paused one is there already
        expected = OUTCOMES[second][found]
        assert answer == "507" or not is_held, f"{first}, then {second}"
        assert then == expected.answer or second in _TIMEOUTS, f"{first} failed, then {second}"
        assert await _end_of(node, sandbox_id) is expected.then, f"{first} failed, then {second}"
        await node.close()
