"""Disks of earlier builds' steps, found by what they depend on. Each is a snapshot of a disk alone that the sweep keeps.

Bounded: the entry that no build has used for longest goes first. An entry whose snapshot is gone is no entry.
"""

from __future__ import annotations

from dataclasses import replace

from agentenv.core.builds import CachedStep
from agentenv.core.clock import Clock
from agentenv.core.model import Context
from agentenv.store.shelf import Shelf
from agentenv.template.workshop import Workshop


class StepCache:
    """The cached steps of a node."""

    def __init__(self, shelf: Shelf[CachedStep], workshop: Workshop, clock: Clock, most: int) -> None:
        self._shelf, self._workshop, self._clock, self._most = shelf, workshop, clock, most

    def find(self, key: str) -> CachedStep | None:
        """The entry of that key, if its disk is still there. Nothing waits here: the caller can hold the disk before it goes."""
        entry = self._shelf.get(key)
        return entry if entry is not None and self._workshop.has(entry.snapshot_id) else None

    async def used(self, entry: CachedStep) -> None:
        """A build goes on from it."""
        await self._shelf.put(replace(entry, used_at_ms=self._clock.now_ms()))

    async def add(self, key: str, snapshot_id: str, context: Context) -> None:
        """Keep the disk after a step, in place of an older one of that key. The caller holds the snapshot meanwhile."""
        await self._shelf.put(CachedStep(key, snapshot_id, replace(context, env_vars=dict(context.env_vars)), self._clock.now_ms()))
        by_age = sorted(self._shelf.all(), key=lambda entry: entry.used_at_ms, reverse=True)
        for entry in by_age[self._most :]:
            await self._shelf.remove(entry.key)
