"""The host's memory as a test says it is: stands in for `host.memory.HostMemory`. VMs are idle and hold nothing unless a test says so."""

from __future__ import annotations

from agentenv.host.memory import Memory

PLENTY = Memory(total_mb=100_000, available_mb=90_000, some_percent=0.0, full_percent=0.0)


class FakeHostMemory:
    """`memory` is now; `held` and `ticks` are by pid, and `ticks` may be changed at any time."""

    def __init__(self) -> None:
        self.memory = PLENTY
        self.held: dict[int, int] = {}
        self.ticks: dict[int, int] = {}

    def now(self) -> Memory:
        """As the test says."""
        return self.memory

    def held_mb(self, pid: int) -> int | None:
        """None unless it was said."""
        return self.held.get(pid)

    def cpu_ticks(self, pid: int) -> int | None:
        """None used unless it was said."""
        return self.ticks.get(pid, 0)
