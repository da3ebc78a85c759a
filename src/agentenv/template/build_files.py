"""Archives that clients upload for COPY steps, by the hash the client has computed of the files in them (contract section 2.7).

The hash is an opaque name: whoever may build on this node may upload. A file appears under its name when all of it is there.
Bounded in the size of one and of all together; the ones no build has used for longest go first. Uploads carry no API
key, so each is allowed by a ticket of its own, which is forgotten when the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

from agentenv.core.clock import Clock
from agentenv.core.errors import InvalidInput, LimitReached, NotFound, PermissionDenied, StorageFull
from agentenv.core.ids import new_token, same_secret
from agentenv.host.files import require_free

_HASH = re.compile(r"[0-9A-Za-z_-]{1,128}")
_TICKET_MS = 2 * 3_600_000  # the SDKs give an upload one hour
_TICKETS_MAX = 10_000
_PARTIAL = ".partial-"


class BuildFiles:
    """The uploaded archives of a node."""

    def __init__(self, folder: Path, clock: Clock, file_max_bytes: int, all_max_bytes: int, reserve_bytes: int) -> None:
        self._folder, self._clock = folder, clock
        self.file_max_bytes, self._all_max_bytes, self._reserve_bytes = file_max_bytes, all_max_bytes, reserve_bytes
        self._tickets: dict[str, tuple[str, int]] = {}  # by hash: ticket, when it ends
        self._in_use: dict[str, int] = {}

    def open(self) -> None:
        """Remove what uploads that were broken off have left. Blocks."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(f"{_PARTIAL}*"):
            path.unlink(missing_ok=True)

    def has(self, files_hash: str) -> bool:
        """Whether an archive is there. InvalidInput when the name is none."""
        return self._path(files_hash).is_file()

    def ticket(self, files_hash: str) -> str:
        """What allows one caller after another to upload this archive for two hours. LimitReached."""
        self._path(files_hash)
        now_ms = self._clock.now_ms()
        self._tickets = {name: ticket for name, ticket in self._tickets.items() if ticket[1] > now_ms}
        if len(self._tickets) >= _TICKETS_MAX:
            raise LimitReached(f"{_TICKETS_MAX} uploads are expected already", "upload what you have asked for first")
        ticket = self._tickets.get(files_hash, (new_token(), 0))[0]
        self._tickets[files_hash] = (ticket, now_ms + _TICKET_MS)
        return ticket

    async def receive(self, files_hash: str, ticket: str, declared_bytes: int | None, chunks: AsyncIterator[bytes]) -> int:
        """Store an archive; returns its size. PermissionDenied without a ticket, InvalidInput when too large, StorageFull."""
        path = self._path(files_hash)
        self._check(files_hash, ticket)
        if declared_bytes is not None and declared_bytes > self.file_max_bytes:
            raise self._too_large()
        require_free(self._folder, self._reserve_bytes + (declared_bytes or 0), "an upload")
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=_PARTIAL, delete=False) as file:
            partial = Path(file.name)
            try:
                size_bytes = await self._write(file, chunks)
                if declared_bytes is not None and size_bytes != declared_bytes:
                    raise InvalidInput(f"the upload has {size_bytes} bytes, {declared_bytes} were announced", "upload it again")
                await asyncio.to_thread(partial.replace, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        await asyncio.to_thread(self._trim)
        return size_bytes

    @contextlib.contextmanager
    def using(self, files_hash: str) -> Iterator[Path]:
        """The file of an archive, safe from being removed for the length of the body. NotFound."""
        path = self._path(files_hash)
        self._in_use[files_hash] = self._in_use.get(files_hash, 0) + 1
        try:
            try:
                os.utime(path)  # the newest use
            except OSError as error:
                raise NotFound(
                    f"the files of this step ({files_hash[:16]}) were not uploaded, or are no longer kept",
                    "build it again",
                ) from error
            yield path
        finally:
            self._in_use[files_hash] -= 1
            if not self._in_use[files_hash]:
                del self._in_use[files_hash]

    async def _write(self, file: IO[bytes], chunks: AsyncIterator[bytes]) -> int:
        size_bytes = 0
        async for chunk in chunks:
            size_bytes += len(chunk)
            if size_bytes > self.file_max_bytes:
                raise self._too_large()
            try:
                await asyncio.to_thread(file.write, chunk)
            except OSError as error:
                raise StorageFull(f"no room for an upload: {error.strerror}", "free some space on the node") from error
        await asyncio.to_thread(file.flush)
        return size_bytes

    def _check(self, files_hash: str, ticket: str) -> None:
        known, ends_at_ms = self._tickets.get(files_hash, ("", 0))
        if not known or ends_at_ms <= self._clock.now_ms() or not same_secret(known, ticket):
            raise PermissionDenied("this upload is not expected, or no longer", "ask for a new URL with GET /templates/{id}/files/{hash}")

    def _too_large(self) -> InvalidInput:
        return InvalidInput(
            f"an upload may have {self.file_max_bytes >> 20} MiB at most",
            "use .dockerignore, or raise limits.build_file_mb",
        )

    def _path(self, files_hash: str) -> Path:
        if not _HASH.fullmatch(files_hash):
            raise InvalidInput(f"{files_hash[:80]!r} is not a hash of files", "it is what the SDK computes, SHA-256 in hex")
        return self._folder / files_hash

    def _trim(self) -> None:
        """Remove the files used longest ago until the others fit."""
        files = [(path, path.stat()) for path in self._folder.iterdir() if not path.name.startswith(_PARTIAL)]
        files.sort(key=lambda item: item[1].st_mtime, reverse=True)
        kept_bytes = 0
        for number, (path, status) in enumerate(files):
            kept_bytes += status.st_size
            if number and kept_bytes > self._all_max_bytes and path.name not in self._in_use:
                path.unlink(missing_ok=True)
