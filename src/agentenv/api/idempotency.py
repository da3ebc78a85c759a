"""Creating once although asked twice: `Idempotency-Key` (contract sections 1.4 and 2.2).

Invariants: for one caller and key, the work runs at most once at a time and not again for `LIFETIME_MS` after it succeeded;
a failure is not remembered, so a repeat may succeed; the work outlives the request that started it, so a client that lost
its connection finds the result by asking again. After a restart of the server, `recall` knows what was created before.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from agentenv.core.clock import Clock
from agentenv.core.errors import InvalidInput, LimitReached

LIFETIME_MS = 3_600_000  # the SDKs repeat for minutes at most
MAX_ENTRIES = 10_000  # about 10 MB of replies
MISMATCH_STATUS = 422
_KEY = re.compile(r"[a-z0-9-]{1,255}")

Reply = dict[str, object] | list[dict[str, object]]
Recall = Callable[[], Awaitable[tuple[str, Reply] | None]]


@dataclass(slots=True)
class _Entry:
    fingerprint: str
    task: asyncio.Task[Reply]
    started_ms: float


class IdempotencyCache:
    """Replies by (caller, key). Owns the tasks that make them: `aclose` ends what still runs."""

    def __init__(self, clock: Clock, max_entries: int = MAX_ENTRIES) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    async def once(
        self, caller: str, key: str | None, fingerprint: str, work: Callable[[], Awaitable[Reply]], recall: Recall | None = None
    ) -> Reply:
        """The reply of `work`, or of an earlier call with the same caller and key; of one before a restart, if `recall` knows it.

        `fingerprint` stands for the request's content. InvalidInput: malformed key. Status 422: the key was used for another
        request. LimitReached: too many are being made at once. Without a key `work` just runs.
        """
        if key is None:
            return await work()
        if not _KEY.fullmatch(key):
            raise InvalidInput("Idempotency-Key: must be 1 to 255 characters of a-z, 0-9 and -", "a lowercase UUID will do")
        self._drop_old()
        if (caller, key) not in self._entries and recall is not None and (known := await recall()) is not None:
            _refuse_other(known[0], fingerprint)
            return known[1]
        entry = self._entries.get((caller, key))
        if entry is None:
            entry = self._start((caller, key), fingerprint, work)
        _refuse_other(entry.fingerprint, fingerprint)
        return await asyncio.shield(entry.task)

    async def aclose(self) -> None:
        """End the work that still runs and forget everything."""
        tasks = [entry.task for entry in self._entries.values() if not entry.task.done()]
        self._entries.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._entries)

    def _start(self, name: tuple[str, str], fingerprint: str, work: Callable[[], Awaitable[Reply]]) -> _Entry:
        if len(self._entries) >= self._max_entries:
            self._make_room()

        async def run() -> Reply:
            return await work()

        entry = _Entry(fingerprint, asyncio.create_task(run(), name="idempotent-create"), self._clock.monotonic_ms())
        self._entries[name] = entry
        entry.task.add_done_callback(lambda task: self._on_done(name, task))
        return entry

    def _on_done(self, name: tuple[str, str], task: asyncio.Task[Reply]) -> None:
        failed = task.cancelled() or task.exception() is not None
        entry = self._entries.get(name)
        if failed and entry is not None and entry.task is task:
            del self._entries[name]

    def _drop_old(self) -> None:
        deadline_ms = self._clock.monotonic_ms() - LIFETIME_MS
        for name, entry in list(self._entries.items()):
            if entry.started_ms > deadline_ms:
                break  # entries are in order of their start
            if entry.task.done():
                del self._entries[name]

    def _make_room(self) -> None:
        for name, entry in self._entries.items():
            if entry.task.done():
                del self._entries[name]
                return
        raise LimitReached(f"{self._max_entries} creations with an Idempotency-Key are under way", "try again in a moment")


def _refuse_other(before: str, now: str) -> None:
    if before != now:
        raise HTTPException(MISMATCH_STATUS, "Idempotency-Key: it was used for a different request; use a new key for a new request")
