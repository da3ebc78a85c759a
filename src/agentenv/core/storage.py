"""The nouns of storage care: how full a disk is, what may go from it, and what a collection has freed. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CacheKind = Literal["build step", "build upload", "build cache mount", "build download", "image blob", "image", "old asset"]


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Of the file system with the node's home, as `df` counts: what is reserved for root is neither used nor free."""

    used_bytes: int
    free_bytes: int

    @property
    def percent(self) -> float:
        """How much of what can be used is used."""
        return 100 * self.used_bytes / max(1, self.used_bytes + self.free_bytes)

    def over_bytes(self, percent: int) -> int:
        """How much must go until at most `percent` is used; 0 when nothing must."""
        return max(0, self.used_bytes - (self.used_bytes + self.free_bytes) * percent // 100)


@dataclass(frozen=True, slots=True)
class CacheItem:
    """One thing that may go without harm: whoever needs it again gets or makes it again. `size_bytes` is what its removal frees."""

    kind: CacheKind
    name: str
    used_at_ms: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Collection:
    """What a collection has freed, or would free: files nothing reaches, and what caches give up, coldest first; and the disk after it."""

    freed_bytes: int
    evicted: tuple[CacheItem, ...]
    disk: DiskUse
