"""A small client of Firecracker's API: JSON over HTTP on a Unix socket, one request at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from agentenv.core.errors import DeadlineExceeded, Internal, Unavailable

_RETRY_S = 0.002
_MAX_NAMED_CHARS = 300


class FirecrackerError(Internal):
    """Firecracker refused a request."""


class FirecrackerApi:
    """Client of one Firecracker. `close` it in the end; Firecracker goes on."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._http = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket)), base_url="http://firecracker")
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
        try:
            async with self._turn:
                reply = await self._http.request(method, path, json=body, timeout=deadline_s)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"Firecracker did not answer {what} within {deadline_s:g} s", "the host may be overloaded") from error
        except httpx.TransportError as error:
            raise Unavailable(f"Firecracker is gone while asked for {what}: {error}") from error
        if reply.status_code >= 300:
            raise FirecrackerError(f"Firecracker refused {what}: {_fault(reply)[:_MAX_NAMED_CHARS]}")
        return reply.json() if reply.content else None

    async def close(self) -> None:
        """Let go of the connection."""
        await self._http.aclose()


def _fault(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["fault_message"])
    except (ValueError, KeyError, TypeError):
        return reply.text
