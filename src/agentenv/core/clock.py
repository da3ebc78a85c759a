"""Wall and monotonic time behind one seam, so that tests of timeouts need no real sleep."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What the orchestrator may know about time."""

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the epoch."""
        ...

    def monotonic_ms(self) -> float:
        """A clock that never steps, in milliseconds."""
        ...

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait; cancellation ends the wait."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        """A clock that never steps, in milliseconds."""
        return time.monotonic_ns() / 1e6

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait; cancellation ends the wait."""
        await asyncio.sleep(max(0.0, duration_ms) / 1000)


def rfc3339(epoch_ms: int) -> str:
    """`epoch_ms` as RFC 3339 in UTC with milliseconds, as the API sends times."""
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
