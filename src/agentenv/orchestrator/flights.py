"""Flights: work that is done once for all who ask for it at the same time, and that all of them hear of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentenv.host.command import Progress
from agentenv.orchestrator.parts import Shared

T = TypeVar("T")


@dataclass
class _Flight(Generic[T]):
    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[T] = field(init=False)
    listeners: list[Progress] = field(default_factory=list)

    def report(self, step: str, done: int | None, total: int | None) -> None:
        """May be called from any thread."""
        self.loop.call_soon_threadsafe(self._tell, step, done, total)

    def _tell(self, step: str, done: int | None, total: int | None) -> None:
        for listener in list(self.listeners):
            listener(step, done, total)


class Flights(Generic[T]):
    """At most `at_once` go on at the same time; others wait their turn. They reach their end when callers leave."""

    def __init__(self, shared: Shared, name: str, at_once: int) -> None:
        self._shared, self._name = shared, name
        self._turns = asyncio.Semaphore(at_once)
        self._flights: dict[object, _Flight[T]] = {}

    async def join(self, key: object, work: Callable[[Progress], Awaitable[T]], listener: Progress) -> T:
        """The outcome of `work`, or of what is under way with that key. `listener` is called on the event loop.

        What `work` is given to report with may be called from any thread. Its errors pass through, to every caller.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.get_running_loop())
            flight.task = self._shared.background(self._fly(key, flight, work), self._name)
        flight.listeners.append(listener)
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.listeners.remove(listener)

    async def _fly(self, key: object, flight: _Flight[T], work: Callable[[Progress], Awaitable[T]]) -> T:
        try:
            async with self._turns:
                return await work(flight.report)
        finally:
            del self._flights[key]
