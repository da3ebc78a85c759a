"""Blobs of images on this machine: a bounded cache, and the folder of an image that was brought as a file.

    <folder>/sha256/<64 hex>     one blob, complete and checked, or not there

Invariant: a blob appears under its name by a rename, after its checksum was compared. Readers compare it again: what is
converted is what the image names, whoever wrote the file. One that a conversion reads is in use and stays.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from agentenv.core.errors import DataCorrupt, NotFound
from agentenv.host.file_cache import FileCache

_YOUNG_S = 3600.0  # younger blobs may belong to a pull under way


class BlobFolder:
    """Blobs by digest below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = FileCache("image blob", folder, _YOUNG_S)

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
                self.cache.touch(path)
                return True
        return False

    def remove_damaged(self, digests: Iterable[str]) -> int:
        """Remove those of the blobs that are there and not what their names say; returns how many."""
        removed = 0
        for path in map(self.path, digests):
            with contextlib.suppress(FileNotFoundError):
                with path.open("rb") as content:
                    found = hashlib.file_digest(content, "sha256").hexdigest()
                if found != path.name:
                    path.unlink()
                    removed += 1
        return removed

    def used_bytes(self) -> int:
        """What all files take, unfinished ones included."""
        total = 0
        for path in self.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size if path.is_file() else 0
        return total

    def using(self, digests: Iterable[str]) -> AbstractContextManager[None]:
        """Keep blobs for the length of the body."""
        return self.cache.using(*map(self.path, digests))

    def prune(self, limit_bytes: int) -> int:
        """Remove the blobs longest unused until at most `limit_bytes` are left; returns the bytes freed. Young ones stay."""
        return self.cache.trim(limit_bytes)
