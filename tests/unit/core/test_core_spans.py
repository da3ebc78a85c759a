"""Spans count what runs within a recording, in whatever task, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.core.spans import recording, server_timing, span


async def test_steps_of_tasks_side_by_side_add_up_to_their_own_recording_only():
    async def call(steps: int) -> dict[str, float]:
        async def one() -> None:
            with span("work"):
                await asyncio.sleep(0.01)

        with recording() as spans:
            await asyncio.gather(*(one() for _ in range(steps)))
        return spans

    few, many, none = await asyncio.gather(call(1), call(4), call(0))
    assert none == {}
    assert set(few) == set(many) == {"work"}
    assert few["work"] >= 10
    assert many["work"] >= 40, "four that took 10 ms each count with 40, although they ran side by side"


def test_a_failed_step_counts_and_one_outside_does_not():
    with recording() as spans, pytest.raises(ZeroDivisionError), span("fails"):
        raise ZeroDivisionError
    with span("later"):
        pass
    assert list(spans) == ["fails"]


def test_the_header():
    assert server_timing({}) == ""
    assert server_timing({"slot": 0.04, "load": 31.25}) == "slot;dur=0.0, load;dur=31.2"
