"""Archives that clients upload for COPY steps, by the hash the client has computed of the files in them (contract section 2.7).

The hash is an opaque name: whoever may build on this node may upload. A file appears under its name when all of it is there.
Bounded in the size of one and of all together; the ones no build has used for longest go first, also when the node's disk gets
full. Uploads carry no API key, so each is allowed by a ticket of its own, which is forgotten when the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

from agentenv.core.clock import Clock
from agentenv.core.errors import InvalidInput, LimitReached, NotFound, PermissionDenied
from agentenv.core.ids import new_token, same_secret
from agentenv.host.file_cache import FileCache
from agentenv.host.files import require_free, storage_full

_HASH = re.compile(r"[0-9A-Za-z_-]{1,128}")
_TICKET_MS = 2 * 3_600_000  # the SDKs give an upload one hour
_TICKETS_MAX = 10_000
_PARTIAL = ".partial-"
_YOUNG_S = 2 * 3600.0  # a client that was told that a file is there may still need hours for its other uploads


class BuildFiles:
    """The uploaded archives of a node."""

    def __init__(self, folder: Path, clock: Clock, file_max_bytes: int, all_max_bytes: int, reserve_bytes: int) -> None:
        self._folder, self._clock = folder, clock
        self.file_max_bytes, self._all_max_bytes, self._reserve_bytes = file_max_bytes, all_max_bytes, reserve_bytes
        self._tickets: dict[str, tuple[str, int]] = {}  # by hash: ticket, when it ends
        self.cache = FileCache("build upload", folder, _YOUNG_S)

    def open(self) -> None:
        """Remove what uploads that were broken off have left. Blocks."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(f"{_PARTIAL}*"):
            path.unlink(missing_ok=True)

    def has(self, files_hash: str) -> bool:
        """Whether an archive is there; it counts as used now, for whoever asks will not send it. InvalidInput when the name is none."""
        path = self._path(files_hash)
        try:
            self.cache.touch(path)
        except FileNotFoundError:
            return False
        return True

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
        with storage_full("an upload"), tempfile.NamedTemporaryFile(dir=self._folder, prefix=_PARTIAL, delete=False) as file:
            partial = Path(file.name)
            try:
                size_bytes = await self._write(file, chunks)
                if declared_bytes is not None and size_bytes != declared_bytes:
                    raise InvalidInput(f"the upload has {size_bytes} bytes, {declared_bytes} were announced", "upload it again")
                await asyncio.to_thread(partial.replace, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        await asyncio.to_thread(self.cache.trim, self._all_max_bytes, (path,), spare_young=False)
        return size_bytes

    @contextlib.contextmanager
    def using(self, files_hash: str) -> Iterator[Path]:
        """The file of an archive, safe from being removed for the length of the body. NotFound."""
        path = self._path(files_hash)
        with self.cache.using(path):
            try:
                self.cache.touch(path)
            except FileNotFoundError as error:
                raise NotFound(
                    f"the files of this step ({files_hash[:16]}) were not uploaded, or are no longer kept",
                    "build it again",
                ) from error
            yield path

    async def _write(self, file: IO[bytes], chunks: AsyncIterator[bytes]) -> int:
        size_bytes = 0
        async for chunk in chunks:
            size_bytes += len(chunk)
            if size_bytes > self.file_max_bytes:
                raise self._too_large()
            await asyncio.to_thread(file.write, chunk)
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
