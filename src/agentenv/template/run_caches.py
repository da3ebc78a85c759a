"""What the cache mounts of RUNs hold between builds: an archive for each id, the one used longest ago given up first.

A RUN begins with what the last one to end has left, so of two at once the later end counts; `locked` ones wait for each other, and
a `private` one that finds the cache in use begins with nothing and leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.host.file_cache import FileCache

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Uses:
    """Who uses a cache now."""

    count: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class KeptCache:
    """One use of a cache. `archive` is what it begins with; None: nothing."""

    archive: Path | None
    _place: Path | None
    _all: RunCaches

    async def keep(self, archive: Path) -> None:
        """Have this be the content from now on; the file goes there. A full disk leaves the former one, and the log says so."""
        if self._place is not None:
            await asyncio.to_thread(self._all.put, archive, self._place)


class RunCaches:
    """The caches of a node; at most `all_max_bytes` are kept."""

    def __init__(self, folder: Path, all_max_bytes: int) -> None:
        self._all_max_bytes = all_max_bytes
        self.files = FileCache("build cache mount", folder, 0.0)
        self._uses: dict[str, _Uses] = {}

    @contextlib.asynccontextmanager
    async def using(self, name: str, sharing: str) -> AsyncIterator[KeptCache]:
        """A cache for the length of the body; a `locked` one waits until no other RUN uses it."""
        uses = self._uses.setdefault(name, _Uses())
        is_apart = sharing == "private" and uses.count > 0
        uses.count += 1
        try:
            async with uses.lock if sharing == "locked" else contextlib.nullcontext():
                place = self.files.folder / hashlib.sha256(name.encode()).hexdigest()
                with self.files.using(place):
                    yield KeptCache(self._begun(place, is_apart), None if is_apart else place, self)
        finally:
            uses.count -= 1
            if not uses.count:
                self._uses.pop(name, None)

    def put(self, archive: Path, place: Path) -> None:
        """Store an archive; never fails. Blocks."""
        fresh = place.with_name(f".{place.name}.{archive.parent.name}")
        try:
            if archive.stat().st_size > self._all_max_bytes:
                _log.warning("a cache of %d MiB is larger than limits.build_caches_mb: it is not kept", archive.stat().st_size >> 20)
                return
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(archive, fresh)
            fresh.replace(place)
        except OSError as error:
            _log.warning("what a RUN has left in a cache is not kept: %s", error)
            fresh.unlink(missing_ok=True)
        self.files.trim(self._all_max_bytes, (place,))

    def _begun(self, place: Path, is_apart: bool) -> Path | None:
        if is_apart:
            return None
        try:
            self.files.touch(place)
        except FileNotFoundError:
            return None
        return place
