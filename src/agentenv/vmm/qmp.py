"""A small client of QEMU's machine protocol (QMP): JSON lines over a Unix socket.

QEMU accepts one monitor connection at a time and takes the next when it closes, so a new server can always connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agentenv.core.errors import DeadlineExceeded, Internal, Unavailable

_RETRY_S = 0.002
_MAX_LINE_BYTES = 4 << 20  # the largest replies (query-qmp-schema, which we do not use) stay below


class QmpError(Internal):
    """QEMU refused a command."""


class Qmp:
    """One monitor connection. Commands are answered in order; events are skipped."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._lock = asyncio.Lock()
        self._ids = itertools.count(1)

    @classmethod
    async def connect(cls, socket: Path, deadline_s: float) -> Qmp:
        """Connect, waiting for QEMU to listen. Unavailable when it does not within the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        qmp = cls(*await asyncio.open_unix_connection(str(socket), limit=_MAX_LINE_BYTES))
                        break
                    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                        await asyncio.sleep(_RETRY_S)
                try:
                    await qmp._reader.readline()  # the greeting
                    await qmp.call("qmp_capabilities", deadline_s)
                except BaseException:
                    await qmp.close()  # or QEMU would go on to talk to nobody, and to nobody else
                    raise
        except (TimeoutError, DeadlineExceeded) as error:
            raise Unavailable(f"no monitor answers on {socket} within {deadline_s:g} s") from error
        except ConnectionError as error:
            raise Unavailable(f"the monitor on {socket} closed at once: {error}") from error
        return qmp

    async def call(self, command: str, deadline_s: float = 10.0, arguments: dict[str, Any] | None = None) -> Any:
        """Run a command and return its result. QmpError when QEMU refuses, Unavailable when it is gone."""
        number = next(self._ids)
        request = {"execute": command, "arguments": arguments or {}, "id": number}
        async with self._lock, self._within(deadline_s, command):
            self._writer.write(json.dumps(request).encode() + b"\n")
            await self._writer.drain()
            while (reply := await self._next()).get("id") != number:
                pass
        if "error" in reply:
            raise QmpError(f"QEMU refused {command}: {reply['error'].get('desc', '')}")
        return reply.get("return")

    @contextlib.asynccontextmanager
    async def _within(self, deadline_s: float, what: str) -> AsyncIterator[None]:
        """Turn what can go wrong on the connection into our errors; after any of these it is not used again."""
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError as error:
            self._writer.transport.abort()  # a late answer would be taken for the next command's
            raise DeadlineExceeded(f"QEMU did not answer {what} within {deadline_s:g} s") from error
        except ConnectionError as error:
            raise Unavailable(f"QEMU is gone while asked for {what}: {error}") from error
        except ValueError as error:
            self._writer.transport.abort()  # what follows on this connection cannot be trusted to be whole
            raise Internal(f"QEMU's answer to {what} is not QMP: {error}") from error

    async def _next(self) -> dict[str, Any]:
        line = await self._reader.readline()
        if not line:
            raise ConnectionResetError("it closed its monitor")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"{line[:80]!r} is not an object")
        return message

    @property
    def closed(self) -> bool:
        """Whether the connection is known to be gone."""
        return self._writer.is_closing() or self._reader.at_eof()

    async def close(self) -> None:
        """Close the connection; QEMU goes on."""
        self._writer.close()
