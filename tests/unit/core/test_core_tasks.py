from __future__ import annotations

import asyncio

import pytest

from agentenv.core.tasks import unless, wait_done

_FOR_EVER = 10**9


async def test_waiting_for_work_hands_back_the_cancellation() -> None:
    work = asyncio.ensure_future(asyncio.sleep(0.01, "done"))
    waiting = asyncio.create_task(wait_done(work))
    await asyncio.sleep(0)
    waiting.cancel()
    assert isinstance(await waiting, asyncio.CancelledError)
    assert work.result() == "done"


async def takes(turns: int, result: str = "", error: Exception | None = None, log: list[str] | None = None) -> str:
    try:
        for _ in range(turns):
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        (log if log is not None else []).append(result)
        raise
    if error is not None:
        raise error
    return result


async def test_work_that_ends_first_gives_its_result_or_error_and_the_other_is_cancelled() -> None:
    cancelled: list[str] = []
    assert await unless(takes(50, "gone", log=cancelled), takes(3, "done"), RuntimeError) == "done"
    with pytest.raises(KeyError):
        await unless(takes(50, "gone too", log=cancelled), takes(3, error=KeyError()), RuntimeError)
    await asyncio.sleep(0)
    assert cancelled == ["gone", "gone too"]


async def test_an_end_that_comes_first_is_the_failure_and_the_work_is_cancelled() -> None:
    cancelled: list[str] = []
    with pytest.raises(RuntimeError, match="it is gone"):
        await unless(takes(3, "it is gone"), takes(50, "work", log=cancelled), RuntimeError)
    await asyncio.sleep(0)
    assert cancelled == ["work"]


@pytest.mark.parametrize(
    ("end_turns", "shows_within_s", "expected"), [(50, 0.0, KeyError), (_FOR_EVER, 0.01, KeyError), (50, 5.0, RuntimeError)]
)
async def test_work_that_fails_because_of_the_end_tells_of_the_end(
    end_turns: int, shows_within_s: float, expected: type[Exception]
) -> None:
    with pytest.raises(expected):
        await unless(takes(end_turns, "it is gone"), takes(3, error=KeyError()), RuntimeError, shows_within_s)


async def test_work_that_is_done_does_not_wait_for_the_end() -> None:
    assert await unless(takes(_FOR_EVER, "gone"), takes(3, "done"), RuntimeError, 60.0) == "done"


async def test_a_cancelled_caller_cancels_both() -> None:
    cancelled: list[str] = []
    caller = asyncio.create_task(unless(takes(50, "end", log=cancelled), takes(50, "work", log=cancelled), RuntimeError))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await asyncio.sleep(0)
    assert sorted(cancelled) == ["end", "work"]
