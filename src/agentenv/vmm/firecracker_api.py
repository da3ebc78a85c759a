"""A small client of Firecracker's API: JSON over HTTP on a Unix socket, one request at a time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpcore

from agentenv.core.errors import DeadlineExceeded, Internal, Unavailable
from agentenv.host.http_limits import all_within

_HEADERS: dict[bytes | str, bytes | str] = {"Host": "firecracker", "Content-Type": "application/json", "Accept": "*/*"}
_RETRY_S = 0.002
_MAX_NAMED_CHARS = 300


class FirecrackerError(Internal):
    """Firecracker refused a request."""


class FirecrackerApi:
    """Client of one Firecracker. `close` it in the end; Firecracker goes on."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._http = httpcore.AsyncConnectionPool(uds=str(socket), max_connections=1)
        self._turn = asyncio.Lock()

    async def wait_listening(self, deadline_s: float) -> None:
        """Return once it answers. Unavailable when it does not within the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        await self.call("GET", "/", deadline_s=deadline_s)
                        return
                    except Unavailable:
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError as error:
            raise Unavailable(f"Firecracker does not answer on {self.socket} within {deadline_s:g} s") from error

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None, deadline_s: float = 10.0) -> Any:
        """One request. FirecrackerError when it is refused, Unavailable when nobody is there, DeadlineExceeded."""
        what = f"{method} {path}"
        content = b"" if body is None else json.dumps(body).encode()
        limits = {"timeout": all_within(deadline_s)}
        try:
            async with self._turn:
                reply = await self._http.request(method, f"http://firecracker{path}", headers=_HEADERS, content=content, extensions=limits)
        except httpcore.TimeoutException as error:
            raise DeadlineExceeded(f"Firecracker did not answer {what} within {deadline_s:g} s", "the host may be overloaded") from error
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise Unavailable(f"Firecracker is gone while asked for {what}: {error}") from error
        if reply.status >= 300:
            raise FirecrackerError(f"Firecracker refused {what}: {_fault(reply)[:_MAX_NAMED_CHARS]}")
        return json.loads(reply.content) if reply.content else None

    async def close(self) -> None:
        """Let go of the connection."""
        await self._http.aclose()


def _fault(reply: httpcore.Response) -> str:
    try:
        return str(json.loads(reply.content)["fault_message"])
    except (ValueError, KeyError, TypeError):
        return reply.content.decode(errors="replace")
