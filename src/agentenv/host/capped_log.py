"""Output of a program that is not ours, kept in a file of bounded size.

    program -> <fifo> (64 KiB in the kernel) -> <file>, and <file>.1 with what came before

A guest decides how much its VMM says, so the VMM must neither fill a disk nor wait for a reader. It writes to a FIFO that it holds
open for reading itself and that never blocks: with nobody to take it away (the server is being restarted), what comes after the
first 64 KiB is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

MAX_BYTES = 256 << 10
"""Of each of the two files: some thousand lines, which is what a person looks at."""
_CHUNK_BYTES = 64 << 10


def open_for_program(fifo: Path) -> int:
    """The end for the program, which the caller closes once the program has it. The FIFO is made if need be."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(fifo, 0o600)
    return os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


class CappedLog:
    """Moves what comes out of a FIFO into a file, until `close` or the last writer's end. `seen` is shown each piece."""

    def __init__(self, fifo: Path, file: Path, max_bytes: int = MAX_BYTES, seen: Callable[[bytes], None] = lambda _: None) -> None:
        self._fifo, self._file, self._max_bytes, self._seen = fifo, file, max_bytes, seen
        self._fd: int | None = None

    def start(self) -> None:
        """Begin. No error when there is no FIFO: then there is nothing to keep."""
        with contextlib.suppress(FileNotFoundError):
            self._fd = os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            asyncio.get_running_loop().add_reader(self._fd, self.take)

    def take(self) -> None:
        """Move what is there now."""
        while self._fd is not None:
            try:
                content = os.read(self._fd, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not content:
                self.close()
                return
            self._keep(content)
            self._seen(content)

    def _keep(self, content: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk: better no log than a guest that stands still
            if self._file.exists() and self._file.stat().st_size + len(content) > self._max_bytes:
                self._file.replace(self._file.with_name(self._file.name + ".1"))
            with self._file.open("ab") as file:
                file.write(content[-self._max_bytes :])

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
