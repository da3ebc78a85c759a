"""The proxy server: its listeners serve the API and all sandboxes alike.

Invariants:
- Requests are routed one by one: a keep-alive connection may mix the API and any number of sandboxes.
- All state is in one object on one event loop; several processes may share a port by passing the same bound socket.
- One sweep enforces all deadlines; no connection holds a timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import select
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.core.errors import HostNotReady
from agentenv.host.listeners import describe_holder
from agentenv.proxy.connection import ClientConnection
from agentenv.proxy.dispatch import Dispatcher
from agentenv.proxy.guard import EnvdPathGuard
from agentenv.proxy.heads import RequestHead
from agentenv.proxy.http2 import Http2Connection
from agentenv.proxy.limits import LISTEN_BACKLOG, ProxySettings
from agentenv.proxy.pool import UpstreamPool
from agentenv.proxy.routes import ENVD_PORT, CloseSignal, Route, RouteTable, SandboxTarget, SignerTable, TargetParser
from agentenv.proxy.signed_urls import parse_signed
from agentenv.proxy.upstream import dial_unix

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProxyStats:
    """Counters since the start, and what is open now. `outcomes` counts exchanges and the notable events in them by name."""

    active_connections: int
    active_exchanges: int
    idle_upstreams: int
    total_connections: int
    total_requests: int
    outcomes: dict[str, int] = field(default_factory=dict)


class ProxyServer:
    """Serves requests for sandboxes through `route_table`, all others through the API's Unix socket (or several, in turn).

    Make it, `start` it and `close` it on one event loop.
    """

    def __init__(self, route_table: RouteTable, api_socket: Path | Sequence[Path], settings: ProxySettings | None = None) -> None:
        self.settings = settings or ProxySettings()
        self._targets = TargetParser(self.settings.domains)
        self._signers = route_table if isinstance(route_table, SignerTable) else None
        self.guard = EnvdPathGuard()
        self.pool = UpstreamPool(self.settings)
        self.closing = False
        self._closed = False
        self.now = 0.0
        self.total_requests = 0
        sockets = [api_socket] if isinstance(api_socket, Path) else list(api_socket)
        self._api_sockets = itertools.cycle(sockets)
        self.dispatcher = Dispatcher(route_table, Route(self._dial_api, CloseSignal()), self.pool, self.settings)
        self._connections: set[ClientConnection | Http2Connection] = set()
        self._empty = asyncio.Event()
        self._total_connections = 0
        self._outcomes: dict[str, int] = {}
        self._listeners: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None

    async def start(
        self, host: str = "127.0.0.1", port: int = 0, *, sock: socket.socket | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> int:
        """Listen on `host` and `port` (0: any free one), or on the bound socket `sock`, which is then owned here; returns the port.

        Call it once for each listener; `ssl_context` makes it one for TLS. Raises HostNotReady if the port is taken or may not be
        used; the hint says by whom.
        """
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time()
        # A handshake holds no place among the counted clients, so it must not last.
        patience_s = None if ssl_context is None else self.settings.handshake_timeout_s
        more: dict[str, Any] = {"backlog": LISTEN_BACKLOG, "ssl": ssl_context, "ssl_handshake_timeout": patience_s}
        try:
            if sock is not None:
                listener = await self.loop.create_server(self._client, sock=sock, **more)
            else:
                listener = await self.loop.create_server(self._client, host, port, **more)
        except OSError as error:
            raise _not_ready(error, host, port) from error
        self._listeners.append(listener)
        if self._sweeper is None:
            self._sweeper = self.loop.create_task(self._sweep())
        return int(listener.sockets[0].getsockname()[1])

    async def close(self, deadline_s: float) -> None:
        """Stop listening, let running exchanges end for up to `deadline_s`, then break off the rest. Repeating it is harmless."""
        self.closing = self._closed = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.close_idle()
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), deadline_s)
        for connection in list(self._connections):
            connection.abort_exchange("shutdown")
        self.pool.close()
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeper
        await asyncio.sleep(0)  # lets the loop close the aborted transports

    def listening(self) -> list[int]:
        """Copies of the descriptors that are listened on, owned by the caller: a connection waits in one of them as long as any is open."""
        return [os.dup(sock.fileno()) for listener in self._listeners for sock in listener.sockets]

    def leave_to(self, dial: Callable[[], Awaitable[socket.socket]]) -> None:
        """Make way for another proxy of this node, which `dial` reaches: it gets all connections to come, and by us the requests to come.

        What is under way goes on, and the answer to the next request of a connection is its last. `close_when_done` comes next.
        """
        self.closing = True
        self.dispatcher.successor = Route(dial, CloseSignal(), through=True)
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            if isinstance(connection, Http2Connection):
                connection.close_idle()  # a GOAWAY tells which requests were not acted upon; HTTP/1.1 has no such word

    async def close_when_done(self, deadline_s: float) -> None:
        """After `leave_to`: return when the last connection has ended, or break off what is left at the deadline."""
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), deadline_s)
        await self.close(0)

    def stats(self) -> ProxyStats:
        """A snapshot of the counters."""
        return ProxyStats(
            active_connections=len(self._connections),
            active_exchanges=sum(connection.active_exchanges for connection in self._connections),
            idle_upstreams=len(self.pool),
            total_connections=self._total_connections,
            total_requests=self.total_requests,
            outcomes=dict(self._outcomes),
        )

    # For the connections

    def target_of(self, head: RequestHead) -> SandboxTarget | None:
        """The sandbox a request is for, None for the API. Raises HeadError (400) on half or malformed names."""
        target = self._targets.parse(head)
        if target is not None or self._signers is None or (file := parse_signed(head)) is None:
            return target
        sandbox_id = self._signers.signer(file)
        return None if sandbox_id is None else SandboxTarget(sandbox_id, ENVD_PORT)

    def count(self, outcome: str) -> None:
        """Count an outcome."""
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1

    def admit(self, connection: ClientConnection) -> bool:
        """Register a new client connection; false if there are too many.

        One that the loop took off the listener before `leave_to`, and shows only now, is served as those that were here already.
        """
        admitted = len(self._connections) < self.settings.client_connections and not self._closed
        self._total_connections += 1
        self._connections.add(connection)
        return admitted

    def replace(self, connection: ClientConnection, successor: Http2Connection) -> None:
        """A client connection goes on in another protocol."""
        self._connections.discard(connection)
        self._connections.add(successor)
        if self.closing:
            successor.close_idle()

    def forget(self, connection: ClientConnection | Http2Connection) -> None:
        """Drop a client connection that is closed."""
        self._connections.discard(connection)
        if self.closing and not self._connections:
            self._empty.set()

    def _client(self) -> ClientConnection:
        return ClientConnection(self)

    async def _dial_api(self) -> socket.socket:
        return dial_unix(next(self._api_sockets))

    # Deadlines

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.settings.sweep_interval_s)
            self.now = self.loop.time()
            self.pool.expire(self.now)
            self._find_dead_clients()
            for connection in list(self._connections):
                try:
                    connection.check(self.now)
                except Exception:
                    log.exception("checking a client connection failed")  # the deadlines of the others must go on
                    connection.abort(reset=False)

    def _find_dead_clients(self) -> None:
        """Ask the kernel about the clients that nobody reads from at the moment."""
        unwatched = {fd: connection for connection in self._connections if (fd := connection.unwatched_fd) >= 0}
        if not unwatched:
            return
        poll = select.poll()
        for fd in unwatched:
            poll.register(fd, select.POLLRDHUP)
        for fd, events in poll.poll(0):
            unwatched[fd].peer_gone(hung_up=bool(events & (select.POLLHUP | select.POLLERR)))


def _not_ready(error: OSError, host: str, port: int) -> HostNotReady:
    if error.errno == errno.EADDRINUSE:
        holder = describe_holder(port)
        return HostNotReady(
            f"port {port} on {host} is already in use{holder and f' by {holder}'}", "stop that program or choose another port"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return HostNotReady(
            f"port {port} on {host} may not be opened: permission denied", "ports below 1024 need root or CAP_NET_BIND_SERVICE"
        )
    return HostNotReady(f"cannot listen on {host} port {port}: {error.strerror or error}", "check that the address belongs to this host")
