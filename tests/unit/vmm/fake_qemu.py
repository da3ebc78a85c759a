"""A scripted QEMU monitor on a Unix socket: one connection at a time, like the real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

GREETING = {"QMP": {"version": {"qemu": {"major": 10}}, "capabilities": []}}
Reply = Callable[["FakeQemu", dict[str, Any]], Awaitable[None]]


class FakeQemu:
    """Answers each command by its entry in `answers` (default: success). `requests` are what it was asked."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.answers: dict[str, Reply] = {}
        self.greets = True
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.hang_up()

    def hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def send(self, *messages: object, raw: bytes = b"") -> None:
        assert self._writer is not None
        self._writer.write(b"".join(json.dumps(message).encode() + b"\r\n" for message in messages) + raw)
        await self._writer.drain()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._turn:
            self.connections += 1
            self._writer = writer
            try:
                if self.greets:
                    await self.send(GREETING)
                while line := await reader.readline():
                    request = json.loads(line)
                    self.requests.append(request)
                    answer = self.answers.get(request["execute"])
                    if answer is None:
                        await self.send({"return": {}, "id": request["id"]})
                    else:
                        await answer(self, request)
            except ConnectionError:
                pass
            finally:
                writer.close()
