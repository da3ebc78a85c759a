"""Blobs of images on this machine: a bounded cache, and the folder of an image that was brought as a file.

    <folder>/sha256/<64 hex>     one blob, complete and checked, or not there

Invariant: a blob appears under its name by a rename, after its checksum was compared. Readers compare it again: what is
converted is what the image names, whoever wrote the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from agentenv.core.errors import DataCorrupt, NotFound

_PRUNE_AGE_S = 3600.0  # younger blobs may belong to a pull under way


class BlobFolder:
    """Blobs by digest below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """Where a blob is, or would be."""
        algorithm, _, name = digest.partition(":")
        return self.folder / algorithm / name

    def read(self, digest: str, limit_bytes: int) -> bytes:
        """A small blob, checked. NotFound, DataCorrupt."""
        try:
            with self.path(digest).open("rb") as blob:
                content = blob.read(limit_bytes + 1)
        except FileNotFoundError as error:
            raise NotFound(f"the blob {digest} is not there") from error
        if len(content) > limit_bytes:
            raise DataCorrupt(f"the blob {digest} is longer than the {limit_bytes} bytes that are accepted")
        if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
            raise DataCorrupt(f"the blob {digest} has another content", "remove it and pull again")
        return content

    def is_complete(self, digest: str, size_bytes: int) -> bool:
        """Whether the blob is there in full length; it counts as used now."""
        path = self.path(digest)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == size_bytes:
                os.utime(path)
                return True
        return False

    def used_bytes(self) -> int:
        """What all files take, unfinished ones included."""
        total = 0
        for path in self.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size if path.is_file() else 0
        return total

    def prune(self, limit_bytes: int) -> int:
        """Remove the blobs longest unused until at most `limit_bytes` are left; returns the bytes freed. Young ones stay."""
        facts = []
        for path in self.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    stat = path.stat()
                    facts.append((stat.st_mtime, stat.st_size, path))
        total, freed = sum(size for _, size, _ in facts), 0
        for used_at, size_bytes, path in sorted(facts):
            if total - freed <= limit_bytes or used_at > time.time() - _PRUNE_AGE_S:
                break
            path.unlink(missing_ok=True)
            freed += size_bytes
        return freed
