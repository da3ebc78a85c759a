"""The proxy alone, in a process of its own, with one sandbox whose ports are this host's. For `proxy.py`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from pathlib import Path

import uvloop

from agentenv.proxy import CloseSignal, ProxyServer, ProxySettings, RequestInfo, Route, SandboxTarget, pages
from agentenv.proxy.guard import check_traffic_token


class Loopback:
    """A route table that does per request what the node's does, but dials this host."""

    def __init__(self, sandbox_id: str) -> None:
        self._sandboxes: dict[str, str | None] = {sandbox_id: None}
        self._signals: dict[str, CloseSignal] = {sandbox_id: CloseSignal()}

    def resolve_now(self, target: SandboxTarget, request: RequestInfo) -> Route | None:
        """The route."""
        if target.sandbox_id not in self._sandboxes:
            raise pages.sandbox_not_found(target.sandbox_id)
        token = self._sandboxes[target.sandbox_id]
        check_traffic_token(target, request, token)

        async def dial() -> socket.socket:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            with contextlib.suppress(BlockingIOError):
                sock.connect(("127.0.0.1", target.port))
            return sock

        return Route(dial, self._signals[target.sandbox_id], traffic_token=token)

    async def resolve(self, target: SandboxTarget, request: RequestInfo) -> Route:
        """Never needed: every route is known at once, or refused."""
        raise pages.sandbox_not_found(target.sandbox_id)


async def serve(port: int) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    proxy = ProxyServer(Loopback("iabcdefghij0123456789"), Path("/nonexistent/api.sock"), ProxySettings(domains=("bench.test",)))
    await proxy.start("127.0.0.1", port)
    await stop.wait()
    await proxy.close(0)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
