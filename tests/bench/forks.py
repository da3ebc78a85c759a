"""What a fork takes: 1, 10 and 50 children that all answer, beside as many creates at once that all answer."""

from __future__ import annotations

from functools import partial
from typing import Any

from samples import DEADLINE_S, Crowd, N, ms, rounds, step, summaries
from verbs import create, kill, run

from agentenv.client import Sandbox

#: By number of children: how many samples one more round is for. Rounds are fewer than elsewhere, since each has three batches.
COUNTS = {1: 5, 10: 20, 50: 50}


def measure(crowd: Crowd) -> dict[str, Any]:
    """By number of children: a fork of a running and of a paused source, and creates; each until the last child has answered."""
    result = {}
    for count, samples in COUNTS.items():
        if count > N:
            continue
        times = rounds(samples)
        step(f"forks into {count}, {times} times")
        found: dict[str, list[float]] = {"fork": [], "fork_call": [], "fork_paused": [], "creates": []}
        for _ in range(times):
            source = create()
            call_ms, whole_ms = _fork(crowd, source, count)
            found["fork"].append(whole_ms)
            found["fork_call"].append(call_ms)
            creates_ms, made = ms(partial(crowd.together, [create] * count))
            found["creates"].append(creates_ms)
            crowd.together([partial(kill, one) for one in made[1]])
            source.pause(request_timeout=DEADLINE_S)
            found["fork_paused"].append(_fork(crowd, source, count)[1])
            kill(source)
        result[str(count)] = summaries(found)
    return result


def _children(source: Sandbox, count: int) -> list[Any]:
    if count > 20:  # the most that the official client asks for
        return list(source.fork_many(count, timeout=3600))
    return list(source.fork(count=count, timeout=3600, request_timeout=DEADLINE_S))


def _fork(crowd: Crowd, source: Sandbox, count: int) -> tuple[float, float]:
    """Durations of the call, and until every child has given its first output, in ms."""

    def whole() -> tuple[float, list[Any]]:
        call_ms, children = ms(lambda: _children(source, count))
        born = [child for child in children if not isinstance(child, Exception)]
        crowd.failures += [f"fork: {child}" for child in children if isinstance(child, Exception)]
        crowd.together([partial(run, child) for child in born])
        return call_ms, born

    whole_ms, (call_ms, born) = ms(whole)
    crowd.together([partial(kill, child) for child in born])
    return call_ms, whole_ms
