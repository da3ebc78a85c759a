"""A pool of network slots in memory. `FakeNetwork` is the machine and survives a killed server.

It hands out the lowest free number, so that a slot given back too early or twice is another's at once and gets noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from agentenv.core.errors import LimitReached
from agentenv.core.network import OPEN, Egress
from agentenv.network.layout import Layout, Slot
from agentenv.testing.failpoints import Failpoints


class FakeNetwork:
    """Which namespaces exist. `in_use` tells whether something lives in one; then it must not be destroyed."""

    def __init__(self, in_use: Callable[[str], bool] = lambda namespace: False) -> None:
        self.present: set[int] = set()
        self.egress: dict[int, Egress] = {}  # policies of those that are not open
        self.bytes_per_s: dict[int, int] = {}  # of each that was handed out; 0: no limit
        self.in_use = in_use
        self.violations: list[str] = []

    def destroy(self, slot: Slot) -> None:
        """Remove a namespace."""
        if self.in_use(slot.namespace):
            self.violations.append(f"namespace {slot.namespace} was destroyed under its VM")
        self.present.discard(slot.number)
        self.egress.pop(slot.number, None)
        self.bytes_per_s.pop(slot.number, None)


class FakeSlots:
    """Stands in for `network.slots.SlotPool`. Points: `slots.acquire`, `slots.apply`, `slots.apply:done`; `slots.destroy` cannot fail."""

    def __init__(self, layout: Layout, network: FakeNetwork, points: Failpoints | None = None) -> None:
        self.layout = layout
        self._network = network
        self._points = points or Failpoints()
        self._held: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, held: Iterable[int]) -> None:
        """Take over `held`, destroy the rest."""
        self._held = set(held)
        for number in self._network.present - self._held:
            self._network.destroy(self.layout.slot(number))

    async def acquire(self, egress: Egress = OPEN, bytes_per_s: int = 0) -> Slot:
        """The lowest free slot. LimitReached when there is none."""
        await self._points.hit("slots.acquire")
        for number in range(self.layout.count):
            if number not in self._network.present and number not in self._held:
                self._held.add(number)
                self._network.present.add(number)
                if egress != OPEN:
                    self._network.egress[number] = egress
                self._network.bytes_per_s[number] = bytes_per_s
                return self.layout.slot(number)
        raise LimitReached(f"all {self.layout.count} network slots are in use")

    async def apply(self, number: int, egress: Egress) -> None:
        """Put a slot under another policy."""
        await self._points.hit("slots.apply")
        self._network.egress.pop(number, None)
        if egress != OPEN:
            self._network.egress[number] = egress
        await self._points.hit("slots.apply:done")

    async def release(self, number: int) -> None:
        """Give back; destroyed a little later. No error when it is not held."""
        if number in self._held:
            self._held.discard(number)
            task = asyncio.create_task(self._destroy(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _destroy(self, number: int) -> None:
        await self._points.hit("slots.destroy", can_fail=False)
        self._network.destroy(self.layout.slot(number))

    def slot(self, number: int) -> Slot:
        """Names and addresses of a slot."""
        return self.layout.slot(number)

    async def settle(self) -> None:
        """Wait until nothing is being destroyed."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self, destroy_ready: bool = True) -> None:
        """Held slots stay."""
        await self.settle()

    def counts(self) -> dict[str, int]:
        """How many are held."""
        return {"ready": 0, "held": len(self._held), "changing": len(self._tasks)}
