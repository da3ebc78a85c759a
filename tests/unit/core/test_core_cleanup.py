from __future__ import annotations

import asyncio

import pytest

from agentenv.core import cleanup as cleanup_module
from agentenv.core.cleanup import Cleanup


class _Steps:
    """Records what ran; a step named in `failing` fails."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.failing: dict[str, BaseException] = {}

    def push(self, cleanup: Cleanup, *names: str) -> None:
        for name in names:
            cleanup.push(name, lambda name=name: self.run(name))

    async def run(self, name: str) -> None:
        await asyncio.sleep(0)
        self.ran.append(name)
        if name in self.failing:
            raise self.failing[name]


@pytest.fixture
def steps() -> _Steps:
    return _Steps()


async def test_last_in_first_out_and_once(steps: _Steps) -> None:
    cleanup = Cleanup()
    steps.push(cleanup, "a", "b", "c")
    assert await cleanup.run() == []
    assert await cleanup.run() == []
    assert steps.ran == ["c", "b", "a"]


async def test_a_kept_stack_undoes_nothing(steps: _Steps) -> None:
    async with Cleanup() as cleanup:
        steps.push(cleanup, "a")
        cleanup.keep()
    assert steps.ran == []


async def test_leaving_the_block_undoes_also_after_an_error(steps: _Steps) -> None:
    async def fail() -> None:
        async with Cleanup() as cleanup:
            steps.push(cleanup, "a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert steps.ran == ["a"]


@pytest.mark.parametrize("error", [OSError("x"), asyncio.CancelledError()], ids=["failed", "cancelled inside"])
async def test_a_failed_step_stops_no_other_and_alone_is_tried_again(steps: _Steps, error: BaseException) -> None:
    cleanup = Cleanup()
    steps.push(cleanup, "a", "b", "c")
    steps.failing["b"] = error
    assert await cleanup.run() == ["b"]
    assert steps.ran == ["c", "b", "a"]
    steps.failing.clear()
    assert await cleanup.run() == []
    assert steps.ran == ["c", "b", "a", "b"]


async def test_each_step_has_its_own_deadline(steps: _Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup_module, "STEP_DEADLINE_S", 0.01)
    cleanup = Cleanup()
    steps.push(cleanup, "a")
    cleanup.push("hangs", lambda: asyncio.sleep(30))
    assert await cleanup.run() == ["hangs"]
    assert steps.ran == ["a"]


async def test_a_cancelled_caller_waits_until_all_steps_have_run(steps: _Steps) -> None:
    release = asyncio.Event()
    cleanup = Cleanup()
    steps.push(cleanup, "a")
    cleanup.push("slow", release.wait)

    async def caller() -> None:
        try:
            await cleanup.run()
        finally:
            steps.ran.append("caller goes on")

    task = asyncio.create_task(caller())
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    assert steps.ran == []
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps.ran == ["a", "caller goes on"]
