"""The doors of a server: its listening sockets, and how they pass to the next server while clients are being served.

    old server                                   next server (a program that may be newer)
    starts it, with copies of its listeners  ->  loads its code and settings, says LOADED
    passes its doors on, ends its verbs,
    closes the store, says GO                ->  opens the node, takes over VMs and disks, accepts; says SERVING
    sees out the connections it has

A connection made meanwhile waits in the kernel for the next server. A stream goes on in the old one until it ends. A request on an
old connection is passed on to the next server. So nobody is refused and nothing is cut off.

Invariants: only one of the two has the node open; until LOADED the old server can go on as if nothing had been; sandboxes do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence

from agentenv.core.errors import AgentEnvError, Unavailable
from agentenv.host import process
from agentenv.host.listeners import pick
from agentenv.host.process import ProcessId
from agentenv.proxy.sandboxes import SandboxRoutes
from agentenv.proxy.server import ProxyServer

_log = logging.getLogger(__name__)
_LOADED, _GO, _SERVING = b"L", b"G", b"S"
_LOAD_DEADLINE_S = 120.0
"""Reading the code and looking at the guest's assets; a second on an idle machine."""
SERVE_DEADLINE_S = 180.0
"""From GO to SERVING: opening the store, taking over what runs."""
_GO_DEADLINE_S = 120.0
"""From LOADED to GO: the old server ends the verbs under way."""
_WATCH_INTERVAL_S = 2.0
Starter = Callable[[Sequence[int], int], ProcessId]
"""Starts the next server with these listeners and its end of a socket pair; it copies both."""


class Turn:
    """The next server's end of the talk."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        os.set_inheritable(fd, False)

    def take(self) -> None:
        """Say LOADED and wait for GO. Blocks. Unavailable when the old server has gone or has thought better of it."""
        self._socket.settimeout(_GO_DEADLINE_S)
        try:
            self._socket.sendall(_LOADED)
            told = self._socket.recv(1)
        except OSError as error:
            raise Unavailable(f"the server before this one does not make way: {error}", "see its log") from error
        if told != _GO:
            raise Unavailable("the server before this one has gone on, or has ended", "see its log; `aenv up` starts a server")

    def serving(self) -> None:
        """Say SERVING."""
        with contextlib.suppress(OSError):
            self._socket.sendall(_SERVING)
        self._socket.close()


class Doors:
    """The proxy of a server with its listeners, old ones first."""

    def __init__(self, proxy: ProxyServer, routes: SandboxRoutes, inherited: list[socket.socket]) -> None:
        self._proxy, self._routes, self._inherited = proxy, routes, inherited
        self._talk: socket.socket | None = None

    async def open(self, host: str, port: int, ssl_context: ssl.SSLContext | None = None) -> None:
        """Accept connections there, on handed-over sockets if there are such. HostNotReady as from `ProxyServer.start`."""
        handed = pick(self._inherited, host, port)
        for sock in handed:
            await self._proxy.start(sock=sock, ssl_context=ssl_context)
        if not handed:
            await self._proxy.start(host, port, ssl_context=ssl_context)

    def all_open(self) -> list[int]:
        """Close what was handed over and is no longer listened on; copies of what is, owned by the caller."""
        while self._inherited:
            self._inherited.pop().close()
        return self._proxy.listening()

    async def pass_on(self, start: Starter) -> bool:
        """Start the next server and let it have every connection to come. False, and nothing has changed, when it does not get ready."""
        listeners = self._proxy.listening()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                starter = await asyncio.to_thread(start, listeners, theirs.fileno())
            ours.setblocking(False)
            told = await _told(ours, _LOAD_DEADLINE_S)
            process.reap(starter.pid)  # it has become nobody's child, and left only this
            if told != _LOADED:
                raise Unavailable("the next server ended before it was ready")
        except AgentEnvError as error:
            _log.error("this server goes on: %s", error)
            ours.close()
            return False
        finally:
            for fd in listeners:
                os.close(fd)
        self._talk = ours
        address = _reachable(self._proxy)
        self._proxy.leave_to(lambda: _dial(*address))
        return True

    async def see_out(self, deadline_s: float, stop: asyncio.Event) -> bool:
        """With the node closed: say GO and serve what is left until it ends, the deadline is over or `stop` is set.

        False when the next server did not come to serve.
        """
        talk, self._talk = self._talk, None
        if talk is None:
            return True
        with talk:
            await asyncio.get_running_loop().sock_sendall(talk, _GO)
            served = await _told(talk, SERVE_DEADLINE_S) == _SERVING
        if not served:
            _log.error("the next server ended, or did not serve within %g s", SERVE_DEADLINE_S)
            await self._proxy.close(0)
            return False
        _log.info("the next server serves; %d connections are left here", self._proxy.stats().active_connections)
        watch = asyncio.create_task(self._watch(), name="watch namespaces")
        told, done = asyncio.create_task(stop.wait()), asyncio.create_task(self._proxy.close_when_done(deadline_s))
        await asyncio.wait({told, done}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watch, told, done):
            task.cancel()
        await self._proxy.close(0)
        return True

    async def _watch(self) -> None:
        """The next server decides over the sandboxes now: that one is gone is seen by its namespace."""
        while True:
            self._routes.close_vanished()
            await asyncio.sleep(_WATCH_INTERVAL_S)


async def until_replaced(doors: Doors, start: Starter, stop: asyncio.Event, make_way: asyncio.Event, api: asyncio.Task[None]) -> bool:
    """Return when the server is to end: True when the next has the doors, False when it was told to stop or the API has ended."""
    waits = {asyncio.create_task(stop.wait()), asyncio.create_task(make_way.wait()), api}
    try:
        while True:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set() or api.done():
                return False
            if await doors.pass_on(start):
                return True
            make_way.clear()
            waits = {task for task in waits if not task.done()} | {asyncio.create_task(make_way.wait())}
    finally:
        for task in waits - {api}:
            task.cancel()


async def _told(talk: socket.socket, deadline_s: float) -> bytes:
    with contextlib.suppress(OSError):
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(talk, 1), deadline_s)
    return b""


def _reachable(proxy: ProxyServer) -> tuple[int, tuple[str, int]]:
    """The address family and the address at which a client on this machine reaches the first listener."""
    fd, *others = proxy.listening()
    for other in others:
        os.close(other)
    with socket.socket(fileno=fd) as listener:
        host, port = listener.getsockname()[:2]
        return listener.family, ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


async def _dial(family: int, address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
