"""One client connection: finds the heads in its byte stream and runs one exchange after the other.

Invariants:
- Answers leave in the order of the requests: the next head is looked at only when the exchange before it has ended.
- Reading stops when the upstream cannot take more, or when more than `PENDING_BYTES_MAX` bytes wait; otherwise it goes on, so that
  a client that leaves is noticed. While reading is stopped the server's sweep asks the kernel instead (`check`).
- After the last answer the sending side is shut and late bytes are dropped for a while, so that the answer is not lost to a reset.
- Every state has a deadline, enforced by `check`.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from typing import TYPE_CHECKING, cast

from agentenv.proxy import pages
from agentenv.proxy.chunked import FramingError
from agentenv.proxy.exchange import Exchange
from agentenv.proxy.heads import (
    HeadError,
    LastHead,
    RequestHead,
    ResponseHead,
    client_response_head,
    has_bare_line_feed,
    parse_request,
)
from agentenv.proxy.http2 import Http2Connection
from agentenv.proxy.http2_library import PREFACE
from agentenv.proxy.limits import HEAD_BYTES_MAX, PENDING_BYTES_MAX, WRITE_HIGH_BYTES, WRITE_LOW_BYTES
from agentenv.proxy.routes import ProxyRefusal, SandboxTarget

if TYPE_CHECKING:
    from agentenv.proxy.server import ProxyServer

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ClientConnection(asyncio.Protocol):
    """See the module."""

    __slots__ = (
        "_advancing",
        "_closing",
        "_closing_since",
        "_first",
        "_head_since",
        "_heads",
        "_queued_bytes",
        "_reading",
        "_scanned",
        "eof",
        "exchange",
        "host",
        "host_bytes",
        "last_moved",
        "pending",
        "proto",
        "server",
        "takes_chunks",
        "transport",
        "write",
        "write_paused",
    )

    def __init__(self, server: ProxyServer) -> None:
        self.server = server
        self.exchange: Exchange | None = None
        self.pending = b""
        self.write_paused = False
        self.eof = False
        self.host = ""
        self.host_bytes = b"unknown"
        self.proto = b"http"
        self.takes_chunks = True
        self.last_moved = server.now
        self._advancing = False
        self._closing = False
        self._closing_since = 0.0
        self._first = True
        self._head_since = server.now
        self._heads = LastHead(parse_request)
        self._queued_bytes = 0
        self._reading = True
        self._scanned = 0

    # Called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        self.write = self.transport.write
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.host = str(peer[0])
            self.host_bytes = self.host.encode("latin-1")
        ssl_object = transport.get_extra_info("ssl_object")
        if ssl_object is not None:
            self.proto = b"https"
        if not self.server.admit(self):
            self.write(pages.render(pages.plain(503, "The proxy has too many client connections", retryable=True), None, close=True))
            self._close_gracefully()
        elif ssl_object is not None and ssl_object.selected_alpn_protocol() == "h2":
            self._become_http2()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._closing:
            self.last_moved = self.server.now
            return
        self.last_moved = self.server.now
        if self.exchange is not None:
            self.exchange.client_data(data)
            return
        self.pending = self.pending + data if self.pending else data
        self._advance()

    def eof_received(self) -> bool:
        """Called by the loop; true keeps our sending side open."""
        self.eof = True
        if self._closing or self.exchange is None:
            return False
        if self.exchange.client_eof():
            return True
        self.exchange = None
        self.abort(reset=False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.server.forget(self)
        exchange, self.exchange = self.exchange, None
        self._closing = True
        if exchange is not None:
            exchange.client_lost()

    def pause_writing(self) -> None:
        """Called by the loop when the client is slow."""
        self.write_paused = True
        if self.exchange is not None and self.exchange.upstream is not None:
            self.exchange.upstream.set_reading(False)

    def resume_writing(self) -> None:
        """Called by the loop when the client has caught up."""
        self.write_paused = False
        if self.exchange is None:
            self._advance()
        elif self.exchange.upstream is not None:
            self.exchange.upstream.set_reading(True)

    # Requests, one after the other

    def _advance(self) -> None:
        """Start exchanges for the heads that have arrived, as long as each ends at once."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self.exchange is None and not self._closing and not self.write_paused and self._next_request():
                pass
        finally:
            self._advancing = False
        if not self._closing:
            self.update_reading()

    def _next_request(self) -> bool:
        """Take one head off the pending bytes and start its exchange; false if there is no whole head yet."""
        head: RequestHead | None = None
        if self._first and self.pending.startswith(b"PRI"):
            if self.pending.startswith(PREFACE):
                self._become_http2()
                return False
            if PREFACE.startswith(self.pending):
                return False
        try:
            data = self._next_head()
            if not data:
                return False
            head = self._heads.parse(data)
            target = self.server.target_of(head)
        except HeadError as error:
            self._refuse_head(head, error)
            return False
        self._start(head, target)
        return True

    def _next_head(self) -> bytes:
        """The bytes of the next head, taken off; empty if it is not complete. Raises HeadError."""
        data = self.pending
        if not self._scanned:
            while data.startswith(b"\r\n"):  # RFC 9112 section 2.2: old clients send an empty line too many
                data = data[2:]
            self.pending = data
            self._head_since = self.server.now
            if data and not 0x21 <= data[0] <= 0x7E and data != b"\r":
                raise HeadError(400, "This is not HTTP; if you meant HTTPS, use the TLS port")
        end = data.find(b"\r\n\r\n", max(0, self._scanned - 3)) + 4
        if end > HEAD_BYTES_MAX or (end < 4 and len(data) > HEAD_BYTES_MAX):
            raise HeadError(431, f"The request head is larger than {HEAD_BYTES_MAX} bytes")
        if end < 4:
            if has_bare_line_feed(data, self._scanned):
                raise HeadError(400, "A line of the request head does not end in CRLF")
            self._scanned = len(data)
            return b""
        self.pending = data[end:]
        self._scanned = 0
        self._first = False
        return data[:end]

    def _become_http2(self) -> None:
        """The client has chosen HTTP/2, by ALPN or by its first bytes (RFC 9113 section 3): another protocol takes the transport."""
        data, self.pending = self.pending, b""
        self._closing = True
        taken_over = Http2Connection(self.server, self.transport, self.host, self.proto)
        self.server.replace(self, taken_over)
        if data:
            taken_over.data_received(data)

    def _start(self, head: RequestHead, target: SandboxTarget | None) -> None:
        self.server.total_requests += 1
        exchange = self.exchange = Exchange(self, head, target)
        try:
            if target is not None:
                self.server.guard.check(target, head.target)
            exchange.start()
        except ProxyRefusal as refusal:
            self.refuse(exchange, refusal)

    def _refuse_head(self, head: RequestHead | None, error: HeadError) -> None:
        """Answer a head that cannot be passed on; what follows it cannot be trusted, so the connection ends."""
        self.server.total_requests += 1
        self.server.count(f"refused_{error.status}")
        self.write(pages.render(pages.plain(error.status, error.message), head, close=True))
        self._close_gracefully()

    def refuse(self, exchange: Exchange, refusal: ProxyRefusal, keep_alive: bool = True) -> None:
        """Answer an exchange in the upstream's place and end it. The connection lives on only if the request's body is already here."""
        self.server.count(f"refused_{refusal.status}")
        keep_alive = keep_alive and exchange.head.keep_alive and not self.server.closing and self._skip_body(exchange)
        self.write(pages.render(refusal, exchange.head, close=not keep_alive))
        self.exchange_done(keep_alive)

    def _skip_body(self, exchange: Exchange) -> bool:
        body = exchange.request_body
        if body is None or body.done:
            return True
        try:
            self.pending = self.pending[body.take(self.pending) :]
        except FramingError:
            return False
        return body.done

    def exchange_done(self, keep_alive: bool) -> None:
        """The current exchange has written its last byte."""
        self.exchange = None
        if not keep_alive or self.eof:
            self._close_gracefully()
        elif self.pending:
            self._advance()
        else:
            self.update_reading()

    # Flow and ends

    def response_head(self, head: ResponseHead, connection: bytes, *, chunked: bool, with_length: bool) -> bytes:
        """The bytes of a response head."""
        return client_response_head(head, connection, chunked=chunked, with_length=with_length)

    def update_reading(self) -> None:
        """Read from the client if, and only if, there is room for what it sends."""
        if self.eof or self.transport.is_closing():
            return
        wanted = len(self.pending) < PENDING_BYTES_MAX
        if wanted and self.exchange is not None and self.exchange.upstream is not None:
            wanted = not self.exchange.upstream.write_paused
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def write_eof(self) -> None:
        """Shut our sending side after what is queued, where the transport can."""
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()

    def close_idle(self) -> None:
        """Close a connection that waits for its next request."""
        if self.exchange is None and not self._closing:
            self._close_gracefully()

    def _close_gracefully(self) -> None:
        self._closing = True
        self.pending = b""
        self.last_moved = self._closing_since = self.server.now
        if self.eof or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.write_eof()
        self.update_reading()

    def abort(self, reset: bool) -> None:
        """Close now and drop what is queued. With `reset` the client's system reports an error even where an end would look tidy."""
        self._closing = True
        self.exchange = None
        if reset:
            sock = self.transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    # Deadlines

    @property
    def active_exchanges(self) -> int:
        """Requests under way."""
        return self.exchange is not None

    @property
    def unwatched_fd(self) -> int:
        """The descriptor while nobody reads from it, so that a dead client must be looked for; else -1."""
        if (self._reading and not self.eof) or self.transport.is_closing():
            return -1
        sock = self.transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def peer_gone(self, hung_up: bool) -> None:
        """The kernel says that the client has closed: entirely if `hung_up`, else at least its sending side."""
        exchange = self.exchange
        may_still_listen = self.eof or (exchange is not None and (exchange.tunnel or not exchange.head.keep_alive))
        if hung_up or not may_still_listen:
            self.abort_exchange("client_gone")

    def abort_exchange(self, outcome: str) -> None:
        """Give up the client and whatever it is doing."""
        exchange = self.exchange
        if exchange is not None:
            exchange.leave(outcome)
        self.abort(reset=exchange is not None and exchange.response_started)

    def check(self, now: float) -> None:
        """Enforce the deadlines; called by the server's sweep."""
        settings, exchange = self.server.settings, self.exchange
        queued_bytes = self._queued()
        if queued_bytes != self._queued_bytes:
            self._queued_bytes = queued_bytes
            self.last_moved = now  # the peer takes what we sent: slow is not idle
        idle_s = now - self.last_moved
        if exchange is not None:
            limit_s = settings.half_closed_idle_s if self.eof and not exchange.tunnel else settings.stream_idle_s
            if idle_s > limit_s:
                self.abort_exchange("idle")
        elif self._closing:
            # A slow client may take its time for our last answer; one that has it all must go soon.
            over = not queued_bytes and now - self._closing_since > settings.linger_total_s
            if over or idle_s > (settings.stream_idle_s if queued_bytes else settings.linger_s):
                self.abort(reset=False)
        elif self.pending:
            if not self.write_paused and now - self._head_since > settings.head_timeout_s:
                self._refuse_head(None, HeadError(408, "The request head did not arrive in time"))
            elif idle_s > settings.stream_idle_s:
                self.abort(reset=False)
        elif idle_s > (settings.leaving_idle_s if self.server.closing else settings.keepalive_idle_s):
            self._close_gracefully()

    def _queued(self) -> int:
        """Bytes that have not reached the client yet, in our buffer and in the kernel's, plus what waits for the upstream."""
        queued = self.transport.get_write_buffer_size()
        if self.exchange is not None:
            upstream = self.exchange.upstream
            return queued if upstream is None else queued + upstream.transport.get_write_buffer_size()
        sock = self.transport.get_extra_info("socket")
        if not self._closing or sock is None or sock.fileno() < 0:
            return queued
        try:
            return queued + int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0])
        except OSError:
            return queued
