"""A folder of files that may go: the one used longest ago first, never one that is in use.

A file's modification time is its last use, which `using` and `touch` renew. Files whose name begins with a dot are still being
written: they are nobody's yet.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.storage import CacheItem, CacheKind


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file as it was when it was listed."""

    path: Path
    size_bytes: int
    used_at_s: float


class FileCache:
    """The files below `folder`. Safe to use from several threads; blocks."""

    def __init__(self, kind: CacheKind, folder: Path, young_s: float) -> None:
        self.kind, self.folder = kind, folder
        self._young_s = young_s
        self._lock = threading.Lock()
        self._in_use: dict[Path, int] = {}

    @contextlib.contextmanager
    def using(self, *paths: Path) -> Iterator[None]:
        """Keep files, there or not, for the length of the body."""
        with self._lock:
            for path in paths:
                self._in_use[path] = self._in_use.get(path, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                for path in paths:
                    self._in_use[path] -= 1
                    if not self._in_use[path]:
                        del self._in_use[path]

    @staticmethod
    def touch(path: Path) -> None:
        """It is used now. FileNotFoundError."""
        os.utime(path)

    def files(self) -> list[CachedFile]:
        """Every file that is whole, the one used longest ago first."""
        found = []
        for path in self.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.name.startswith("."):
                    status = path.stat()
                    found.append(CachedFile(path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda file: (file.used_at_s, file.path))

    def cold(self) -> list[CacheItem]:
        """What may go now: neither in use nor young."""
        return [self._item(file) for file in self.files() if self._is_cold(file)]

    def evict(self, item: CacheItem) -> bool:
        """Remove one of `cold`. False when it has been used since, or is gone."""
        path = self.folder / item.name
        with self._lock:
            try:
                if path in self._in_use or round(1000 * path.stat().st_mtime) != item.used_at_ms:
                    return False
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def trim(self, limit_bytes: int, kept: Sequence[Path] = (), *, spare_young: bool = True) -> int:
        """Remove files until at most `limit_bytes` are left, as far as those in use, young and `kept` allow; returns what was freed."""
        files = self.files()
        over_bytes, freed = sum(file.size_bytes for file in files) - limit_bytes, 0
        for file in files:
            if freed >= over_bytes:
                break
            if file.path not in kept and self._is_cold(file, spare_young) and self.evict(self._item(file)):
                freed += file.size_bytes
        return freed

    def _item(self, file: CachedFile) -> CacheItem:
        return CacheItem(self.kind, str(file.path.relative_to(self.folder)), round(1000 * file.used_at_s), file.size_bytes)

    def _is_cold(self, file: CachedFile, spare_young: bool = True) -> bool:
        if spare_young and file.used_at_s > time.time() - self._young_s:
            return False
        with self._lock:
            return file.path not in self._in_use
