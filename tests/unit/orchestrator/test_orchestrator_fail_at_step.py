"""Fail at step k, for every k that a verb passes: nothing leaks, the state is right, and a second attempt works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentenv.core.errors import AgentEnvError, Internal, StorageFull, Unavailable
from agentenv.core.lifecycle import State
from agentenv.testing.fake_node import FakeNode

_STEPS_MAX = 60
_BACKGROUND_MS = 500
MOUNTS = (("data", "/data"),)  # so that every verb has all the steps it can have


async def create(node: FakeNode, sandbox_id: str) -> None:
    await node.create(volume_mounts=MOUNTS)


async def pause(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.pause(sandbox_id)


async def pause_disk(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.pause(sandbox_id, memory=False)


async def boot(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.connect(sandbox_id, 600, memory=False)


async def resume(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.resume(sandbox_id, 600)


async def fork(node: FakeNode, sandbox_id: str) -> None:
    outcomes = await node.orchestrator.fork(sandbox_id, 2, 600)
    if failed := [outcome for outcome in outcomes if outcome.sandbox is None]:
        is_retryable = all(outcome.error_status == Unavailable.status for outcome in failed)
        raise (Unavailable if is_retryable else Internal)(failed[0].error_message)


async def snapshot_disk(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.snapshot(sandbox_id, "mine", memory=False)


async def snapshot(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.snapshot(sandbox_id, "mine")


async def checkpoint(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.checkpoint(sandbox_id, "")


async def rollback(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.rollback(sandbox_id, "start")


async def kill(node: FakeNode, sandbox_id: str) -> None:
    await node.orchestrator.kill(sandbox_id)


#: verb, state before, states allowed after a failed attempt
VERBS: dict[str, tuple[Callable[[FakeNode, str], Awaitable[None]], State, set[State]]] = {
    "create": (create, State.RUNNING, {State.RUNNING}),
    "pause": (pause, State.RUNNING, {State.RUNNING, State.PAUSED}),
    "pause of the disk": (pause_disk, State.RUNNING, {State.RUNNING, State.PAUSED}),
    "boot of a paused one": (boot, State.PAUSED, {State.RUNNING, State.PAUSED}),
    "resume": (resume, State.PAUSED, {State.RUNNING, State.PAUSED}),
    "fork of a running one": (fork, State.RUNNING, {State.RUNNING}),
    "fork of a paused one": (fork, State.PAUSED, {State.PAUSED}),
    "snapshot of the disk of a running one": (snapshot_disk, State.RUNNING, {State.RUNNING}),
    "snapshot of the disk of a paused one": (snapshot_disk, State.PAUSED, {State.PAUSED}),
    "snapshot of a running one": (snapshot, State.RUNNING, {State.RUNNING}),
    "snapshot of a paused one": (snapshot, State.PAUSED, {State.PAUSED}),
    "checkpoint of a running one": (checkpoint, State.RUNNING, {State.RUNNING}),
    "checkpoint of a paused one": (checkpoint, State.PAUSED, {State.PAUSED}),
    "rollback of a running one": (rollback, State.RUNNING, {State.RUNNING}),
    "rollback of a paused one": (rollback, State.PAUSED, {State.PAUSED}),
    "kill of a running one": (kill, State.RUNNING, {State.RUNNING, State.KILLED}),
    "kill of a paused one": (kill, State.PAUSED, {State.PAUSED, State.KILLED}),
}


async def begin(node: FakeNode, name: str, sandbox_id: str, step: int) -> tuple[asyncio.Task[None], list[str]]:
    """Start a verb and let it go on until it has passed `step` points, or fewer if it has no more. Returns it, and those points."""
    start = len(node.points.passed)
    task: asyncio.Task[None] = asyncio.ensure_future(VERBS[name][0](node, sandbox_id))
    for _ in range(400):
        if len(node.points.passed) >= start + step:
            break
        await asyncio.sleep(0)
    return task, node.points.passed[start:]


_AT_ONCE = ("pause", "pause of the disk", "boot of a paused one", "resume", "rollback of a running one")
ERRORS = {"a full disk": StorageFull, "a bug": ZeroDivisionError}


#: those whose steps depend on who writes memory
CAPTURES = ("pause", "fork of a running one", "snapshot of a running one", "checkpoint of a running one")


async def _prepared(folder: Path, state: State, writes_memory: bool) -> tuple[FakeNode, str]:
    node = FakeNode(folder, writes_memory=writes_memory)
    await node.start_server()
    await node.parts.volumes.create("data")
    sandbox_id = await node.create(volume_mounts=MOUNTS)
    assert node.process(sandbox_id).write("0", "before")
    await node.orchestrator.checkpoint(sandbox_id, "start")
    if state is State.PAUSED:
        await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    assert node.problems() == []
    return node, sandbox_id


async def _fail_at(folder: Path, name: str, step: int, error: type[Exception], writes_memory: bool) -> bool:
    """Run the verb with a failure at `step`; False when it has fewer steps."""
    verb, before, allowed = VERBS[name]
    node, sandbox_id = await _prepared(folder, before, writes_memory)
    node.points.fail("*", at=step, error=error("injected"))
    passed_before = len(node.points.passed)
    failed = False
    try:
        await verb(node, sandbox_id)
    except (AgentEnvError, ZeroDivisionError):
        failed = True
        if name in _AT_ONCE and issubclass(error, AgentEnvError):  # its own undo, not the later repair, has brought it back
            assert node.row(sandbox_id).state in (before, State.KILLED), (
                f"{name}: left {node.row(sandbox_id).state} by {node.points.failed}"
            )
    node.clock.advance_ms(_BACKGROUND_MS)  # the failure may be met by what goes on after the answer
    await node.turn()
    if not node.points.failed:
        await node.close()
        return False
    where = f"{name}: failure at step {step}, {node.points.failed}; steps: {node.points.passed[passed_before:]}"
    node.points.clear()
    await node.quiesce()
    assert node.problems() == [], where
    row = node.row(sandbox_id)
    lost = row.state is State.KILLED and node.points.failed == ["vm.resume"]  # a VM that cannot go on is lost, and that is said
    assert row.state in allowed or lost, where
    if row.state is not State.KILLED:
        assert node.content(sandbox_id) == {"booted": "yes", "0": "before"}, where
    if failed and row.state is before:
        await verb(node, sandbox_id)
        await node.quiesce()
        assert node.problems() == [], f"second attempt after {where}"
    if not failed:
        assert row.state is not before or name.startswith(("create", "fork", "snapshot", "checkpoint", "rollback")), (
            f"it said it worked: {where}"
        )
    await node.close()
    return True


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("name", VERBS)
async def test_a_failure_at_any_step_leaks_nothing_and_can_be_tried_again(ram_path: Path, name: str, error: type[Exception]) -> None:
    await _fail_at_each(ram_path, name, error, writes_memory=False)


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("name", CAPTURES)
async def test_a_failure_loses_no_page_that_a_vmm_has_told_of(ram_path: Path, name: str, error: type[Exception]) -> None:
    await _fail_at_each(ram_path, name, error, writes_memory=True)


async def _fail_at_each(ram_path: Path, name: str, error: type[Exception], writes_memory: bool) -> None:
    for step in range(1, _STEPS_MAX):
        if not await _fail_at(ram_path / str(step), name, step, error, writes_memory):
            assert step > 3, f"{name} has only {step - 1} steps: the failures do not reach it"
            return
    pytest.fail(f"{name} has {_STEPS_MAX} steps or more: raise the limit of this test")
