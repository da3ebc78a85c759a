"""The real store, whose commits can be told to fail; and a shelf in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentenv.core.clock import Clock
from agentenv.store.shelf import Noun
from agentenv.store.sqlite import Store
from agentenv.testing.failpoints import Failpoints, InlineExecutor

T = TypeVar("T")


class FailingStore(Store):
    """Point: `store.commit`, before each one. Works in the calling thread, so that a seed gives one order of events."""

    def __init__(self, path: Path, clock: Clock, points: Failpoints) -> None:
        super().__init__(path, clock)
        self._worker = InlineExecutor(1)
        self._points = points

    async def _run(self, work: Callable[[], T]) -> T:
        if self._points.is_killed:  # a dead process commits nothing, however near it was
            await asyncio.get_running_loop().create_future()
        return await super()._run(work)

    async def _execute(self, *statements: tuple[str, tuple[Any, ...]], mirror: Callable[[], object] = lambda: None) -> None:
        await self._points.hit("store.commit")
        await super()._execute(*statements, mirror=mirror)


class MemoryShelf(Generic[Noun]):
    """Implements `store.shelf.Shelf` without a file."""

    def __init__(self, id_field: str) -> None:
        self._id_field = id_field
        self._nouns: dict[str, Noun] = {}

    def get(self, noun_id: str) -> Noun | None:
        """The noun of that id, or None."""
        return self._nouns.get(noun_id)

    def all(self) -> list[Noun]:
        """Every noun, in the order they came."""
        return list(self._nouns.values())

    async def put(self, noun: Noun) -> None:
        """Add it, or replace the one of the same id."""
        self._nouns[str(getattr(noun, self._id_field))] = noun

    async def remove(self, noun_id: str) -> None:
        """Forget it."""
        self._nouns.pop(noun_id, None)
