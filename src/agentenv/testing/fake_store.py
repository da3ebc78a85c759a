"""The real store, whose commits can be told to fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv.core.clock import Clock
from agentenv.store.sqlite import Store
from agentenv.testing.failpoints import Failpoints, InlineExecutor


class FailingStore(Store):
    """Point: `store.commit`, before each one. Works in the calling thread, so that a seed gives one order of events."""

    def __init__(self, path: Path, clock: Clock, points: Failpoints) -> None:
        super().__init__(path, clock)
        self._worker = InlineExecutor(1)
        self._points = points

    async def _execute(self, *statements: tuple[str, tuple[Any, ...]], mirror: Callable[[], object] = lambda: None) -> None:
        await self._points.hit("store.commit")
        await super()._execute(*statements, mirror=mirror)
