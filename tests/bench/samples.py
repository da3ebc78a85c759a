"""Samples of the bench: how many, how they are taken (one at a time or side by side), and what they come to.

`AENV_BENCH_N` is the number of samples of what is measured one at a time (default 100); what runs side by side has about as many, and
is left out where one round would take more.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rich.console import Console

N = int(os.environ.get("AENV_BENCH_N", "100"))
COMMAND = "echo hello from $(uname -sr)"
DEADLINE_S = 600  # of every call: with many at once on a slow machine the last one waits for all others
err = Console(stderr=True)
T = TypeVar("T")


def rounds(size: int, least: int = 2) -> int:
    """How often `size` samples at a time are taken."""
    return max(least, N // size)


def step(text: str) -> None:
    """Say what is being measured."""
    err.print(f"==> {time.strftime('%H:%M:%S')} {text}", highlight=False)


def ms(work: Callable[[], T]) -> tuple[float, T]:
    """Duration in ms and result."""
    began = time.perf_counter()
    result = work()
    return 1000 * (time.perf_counter() - began), result


class Crowd:
    """Works that run side by side, each in a thread of its own. Those that fail are counted, and say so on stderr."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def together(self, works: Sequence[Callable[[], T]]) -> tuple[list[float], list[T]]:
        """Start all at once; durations from then, in ms, and results of those that did not fail."""
        if not works:
            return [], []
        began = time.perf_counter()

        def one(work: Callable[[], T]) -> tuple[float, T] | None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are measured, and the report names it
                self.failures.append(f"{type(error).__name__}: {error}")
                err.print(f"    failed: {self.failures[-1][:300]}", highlight=False, markup=False)
                return None
            return 1000 * (time.perf_counter() - began), result

        with ThreadPoolExecutor(len(works)) as pool:
            found = [outcome for outcome in pool.map(one, works) if outcome is not None]
        return [took for took, _ in found], [result for _, result in found]


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile, extremes and count."""
    ordered = sorted(samples)
    if not ordered:
        raise RuntimeError("nothing could be measured")
    return {
        "p50_ms": statistics.median(ordered),
        "p95_ms": at(ordered, 0.95),
        "p99_ms": at(ordered, 0.99),
        "min_ms": ordered[0],
        "max_ms": ordered[-1],
        "n": len(ordered),
    }


def at(ordered: Sequence[float], share: float) -> float:
    """The sample that `share` of all do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def summaries(found: dict[str, list[float]]) -> dict[str, Any]:
    """`summary` of each."""
    return {name: summary(samples) for name, samples in found.items()}
