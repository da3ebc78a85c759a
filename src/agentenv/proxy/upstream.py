"""One connection to a server behind the proxy, and how it is made.

Invariants:
- A connection belongs to one exchange or to the pool. Whatever happens to it is told to its owner exactly once.
- It listens to its route's `CloseSignal` for all its life, so no stream outlives the run of its sandbox.
- A dialled socket is closed on every path that does not hand it on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from agentenv.proxy.heads import LastHead, ResponseHead, parse_response
from agentenv.proxy.limits import LAST_GASP_BYTES_MAX, WRITE_HIGH_BYTES, WRITE_LOW_BYTES
from agentenv.proxy.routes import Route

if TYPE_CHECKING:
    from agentenv.proxy.exchange import Exchange
    from agentenv.proxy.pool import UpstreamPool

_UNREACHABLE = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT, errno.ENOENT, errno.EAGAIN)


class UpstreamConnection(asyncio.Protocol):
    """Passes what it receives to its exchange."""

    __slots__ = (
        "_closed",
        "_eof",
        "_pool",
        "_reading",
        "_sock",
        "exchange",
        "heads",
        "idle_since",
        "key",
        "reused",
        "transport",
        "write",
        "write_paused",
    )

    def __init__(self, key: Hashable, route: Route, pool: UpstreamPool, sock: socket.socket) -> None:
        self.key = key
        self.exchange: Exchange | None = None
        self.heads: LastHead[ResponseHead] = LastHead(parse_response)
        self.idle_since = 0.0
        self.reused = False
        self.write_paused = False
        self._closed = route.closed
        self._eof = False
        self._pool = pool
        self._reading = True
        self._sock = sock

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        self.write = self.transport.write
        self._closed.subscribe(self._run_ended)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self.exchange is not None:
            self.exchange.upstream_data(data)
        else:
            self._drop_idle()  # nobody asked: a later request must not get this as its answer

    def eof_received(self) -> bool:
        """Called by the loop; true keeps our sending side open."""
        self._eof = True
        if self.exchange is not None:
            return self.exchange.upstream_eof()
        self._drop_idle()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._closed.unsubscribe(self._run_ended)
        exchange = self.exchange
        if exchange is None:
            self._pool.discard(self)
            return
        if exc is not None and not exchange.response_started:
            # A write failed, but an early answer may still lie in the receive queue.
            with contextlib.suppress(OSError, ValueError):
                data = self._sock.recv(LAST_GASP_BYTES_MAX)
                if data:
                    exchange.upstream_data(data)
        if self.exchange is exchange:
            exchange.upstream_lost()

    def pause_writing(self) -> None:
        """Called by the loop when the upstream is slow."""
        self.write_paused = True
        if self.exchange is not None:
            self.exchange.client.update_reading()

    def resume_writing(self) -> None:
        """Called by the loop when the upstream has caught up."""
        self.write_paused = False
        if self.exchange is not None:
            self.exchange.client.update_reading()

    def set_reading(self, wanted: bool) -> None:
        """Pause or resume reading, as the client can take it."""
        if wanted != self._reading and not self._eof and not self.transport.is_closing():
            self._reading = wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def is_fresh(self) -> bool:
        """Whether an idle connection is still open and silent, asked of the kernel so that a close in flight is seen."""
        if self.transport.is_closing() or self.write_paused:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return False

    def abort(self) -> None:
        """Close now; the owner is not told."""
        self.exchange = None
        self._closed.unsubscribe(self._run_ended)
        self.transport.abort()

    def disown(self) -> None:
        """Forget a connection that never got an owner; its transport is closed already."""
        self._closed.unsubscribe(self._run_ended)

    def close(self, deadline_s: float) -> None:
        """Close after what is queued has been sent, or at the deadline; the owner is not told."""
        self.exchange = None
        self.transport.close()
        asyncio.get_running_loop().call_later(deadline_s, self.transport.abort)

    def _drop_idle(self) -> None:
        self._pool.discard(self)
        self.abort()

    def _run_ended(self) -> None:
        exchange = self.exchange
        self._pool.discard(self)
        self.abort()
        if exchange is not None:
            exchange.run_ended()


def is_unreachable(error: OSError) -> bool:
    """Whether a dial failed because nothing answers there (yet), as opposed to a fault of ours."""
    return isinstance(error, TimeoutError) or error.errno in _UNREACHABLE


async def open_upstream(
    make: Callable[[socket.socket], UpstreamConnection], route: Route, delays_ms: tuple[int, ...], timeout_s: float
) -> UpstreamConnection:
    """Dial until something answers, pausing `delays_ms` between refusals; each dial may take `timeout_s`. Raises OSError."""
    for delay_ms in (*delays_ms, None):
        try:
            async with asyncio.timeout(timeout_s):
                return await _open_once(make, route)
        except OSError as error:
            # A dial that hung has used up its patience; only quick refusals are worth repeating.
            if delay_ms is None or not is_unreachable(error) or isinstance(error, TimeoutError):
                raise
            await asyncio.sleep(delay_ms / 1000)
    raise AssertionError("the last dial returns or raises")


async def _open_once(make: Callable[[socket.socket], UpstreamConnection], route: Route) -> UpstreamConnection:
    loop = asyncio.get_running_loop()
    sock = await route.dial()
    made: UpstreamConnection | None = None
    try:
        sock.setblocking(False)
        await _connected(loop, sock)
        connection = made = make(sock)
        if sock.family == socket.AF_UNIX:
            await loop.create_unix_connection(lambda: connection, sock=sock)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.create_connection(lambda: connection, sock=sock)
    except BaseException:
        if made is not None:
            made.disown()  # uvloop tells no protocol of the end of a connection whose maker was cancelled
        sock.close()
        raise
    return connection


async def _connected(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Wait until a connecting socket is connected. Raises OSError."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(0):
        writable: asyncio.Future[None] = loop.create_future()
        loop.add_writer(sock.fileno(), _set_done, writable)
        try:
            await writable
        finally:
            loop.remove_writer(sock.fileno())
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, "connect failed")


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def dial_unix(path: Path) -> socket.socket:
    """Connect to a Unix socket without waiting. Raises OSError; EAGAIN means that its accept queue is full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(str(path))
    except BaseException:
        sock.close()
        raise
    return sock
