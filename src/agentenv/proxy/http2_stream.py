"""One stream of a client's HTTP/2 connection: one request and its response.

Invariants:
- A stream is to its exchange what a whole connection is over HTTP/1.1, so routing, admission, Host policy, retries and ends are the same.
- The peer gets window for what its upstream has taken, never more: a slow upstream holds `HTTP2_WINDOW_BYTES` at most, and holds up
  no other stream. What waits for the peer's window is bounded likewise, by pausing the upstream.
- A broken response ends in RST_STREAM, never in END_STREAM (contract section 3.5).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from h2.errors import ErrorCodes

from agentenv.proxy import pages
from agentenv.proxy.chunked import ChunkScanner, FramingError
from agentenv.proxy.exchange import Exchange
from agentenv.proxy.grpc import GrpcExchange
from agentenv.proxy.heads import HeadError, RequestHead, ResponseHead
from agentenv.proxy.http2_heads import Fields, is_grpc, parse_fields, response_fields, trailer_lines
from agentenv.proxy.limits import HTTP2_STREAM_BUFFER_BYTES
from agentenv.proxy.routes import ProxyRefusal

if TYPE_CHECKING:
    from agentenv.proxy.http2 import Http2Connection


class Http2Stream:
    """See the module. Made by `Http2Connection` for each request; `start` sets it off."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_early",
        "_ending",
        "_out",
        "_out_bytes",
        "_owed_bytes",
        "_trailers",
        "eof",
        "exchange",
        "host",
        "host_bytes",
        "last_moved",
        "proto",
        "request_ended",
        "server",
        "stream_id",
        "takes_chunks",
        "write_paused",
    )

    def __init__(self, connection: Http2Connection, stream_id: int) -> None:
        self._connection = connection
        self.server = connection.server
        self.stream_id = stream_id
        self.exchange: Exchange | GrpcExchange | None = None
        self.host = connection.host
        self.host_bytes = connection.host_bytes
        self.proto = connection.proto
        self.takes_chunks = False
        self._early = bytearray()
        self.write_paused = False
        self.eof = False
        self.last_moved = connection.server.now
        self.request_ended = False
        self._chunked = False
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._owed_bytes = 0
        self._trailers: Fields = []
        self._ending = False

    # From the peer

    def start(self, fields: Fields, ended: bool) -> None:
        """Begin the exchange that `fields` ask for, or answer in its place."""
        server, head = self.server, None
        server.total_requests += 1
        self.request_ended = ended
        try:
            head = parse_fields(fields, ended)
            target = server.target_of(head)
        except HeadError as error:
            server.count(f"refused_{error.status}")
            self._answer(pages.plain(error.status, error.message), head)
            return
        if is_grpc(head) and target is not None:
            self.exchange = GrpcExchange(self, head, target)
        else:
            self._chunked = head.chunked
            self.exchange = Exchange(self, head, target)
        try:
            if target is not None:
                server.guard.check(target, head.target)
            self.exchange.start()
        except ProxyRefusal as refusal:
            self.refuse(self.exchange, refusal)

    def data(self, data: bytes, charged_bytes: int) -> None:
        """Body bytes, which cost the peer `charged_bytes` of its window."""
        self.last_moved = self.server.now
        self._owed_bytes += charged_bytes
        exchange = self.exchange
        if exchange is None:
            return  # answered early; the window stays shut, and the reset is on its way
        if data:
            self._hand_on(exchange, b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)
        self.update_reading()

    def end(self, trailers: Fields) -> None:
        """The request is complete."""
        self.request_ended = True
        exchange = self.exchange
        if isinstance(exchange, GrpcExchange):
            exchange.client_end(trailers)
        elif exchange is not None and self._chunked:
            try:
                self._hand_on(exchange, trailer_lines(trailers))
            except FramingError:
                self.gone("bad_request")
                self.reset(ErrorCodes.PROTOCOL_ERROR)

    def _hand_on(self, exchange: Exchange | GrpcExchange, data: bytes) -> None:
        """Body bytes for the upstream; without one yet they are collected here, because frames may be as small as one byte."""
        if exchange.upstream is None:
            self._early += data
        else:
            exchange.client_data(data)

    @property
    def pending(self) -> bytes:
        """What has arrived before there was an upstream to take it."""
        return bytes(self._early)

    @pending.setter
    def pending(self, rest: bytes) -> None:
        self._early = bytearray(rest)

    def gone(self, outcome: str) -> None:
        """The peer has reset the stream or is gone itself, or its time is up."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.leave(outcome)

    # For the exchange

    def response_head(self, head: ResponseHead, connection: bytes, *, chunked: bool, with_length: bool) -> bytes:
        """Send a head; see `exchange.Client`."""
        self.send_fields(response_fields(head, with_length), ended=False)
        return b""

    def send_fields(self, fields: Fields, ended: bool) -> None:
        """Send a head of any kind, at once; with `ended` it is the whole response."""
        self._connection.send_headers(self, fields, ended)
        if ended:
            self._connection.stream_done(self)

    def write(self, data: bytes) -> None:
        """Send body bytes, as far as the peer's window allows; the rest waits."""
        if not data:
            return
        self._out.append(memoryview(data))
        self._out_bytes += len(data)
        self._connection.pump(self)
        self._balance()

    def write_eof(self) -> None:
        """Tunnels do not exist on streams."""

    def update_reading(self) -> None:
        """Give window back for what the upstream has taken."""
        exchange = self.exchange
        if exchange is None or exchange.upstream is None or exchange.upstream.write_paused or self._early:
            return
        owed, self._owed_bytes = self._owed_bytes, 0
        if owed:
            self._connection.credit(self, owed)

    def refuse(self, exchange: Exchange | GrpcExchange, refusal: ProxyRefusal, keep_alive: bool = True) -> None:
        """Answer in the upstream's place."""
        self.server.count(f"refused_{refusal.status}")
        self.exchange = None
        self._answer(refusal, exchange.head)

    def _answer(self, refusal: ProxyRefusal, head: RequestHead | None) -> None:
        fields, body = pages.content(refusal, head)
        answer = [(b":status", b"%d" % refusal.status), *((k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in fields)]
        self.send_fields(answer, ended=not body)
        if body:
            self.write(body)
            self.finish([])

    def exchange_done(self, keep_alive: bool) -> None:
        """The response is complete."""
        exchange, self.exchange = self.exchange, None
        body = exchange.response_body if isinstance(exchange, Exchange) else None
        self.finish(body.trailers if isinstance(body, ChunkScanner) else [])

    def finish(self, trailers: Fields) -> None:
        """End the response after what waits."""
        self._trailers = trailers
        self._ending = True
        self._connection.pump(self)

    def abort(self, reset: bool) -> None:
        """Break the response off, dropping what waits."""
        self.reset(ErrorCodes.INTERNAL_ERROR)

    def reset(self, code: int) -> None:
        """Send RST_STREAM and forget the stream."""
        self.exchange = None
        self._ending = False
        self._out.clear()
        self._out_bytes = 0
        self._connection.reset_stream(self, code)

    # For the connection

    @property
    def waiting_bytes(self) -> int:
        """What waits for window."""
        return self._out_bytes

    @property
    def waits_to_send(self) -> bool:
        """Whether data or the end of the response waits."""
        return bool(self._out) or self._ending

    @property
    def trailers_due(self) -> Fields | None:
        """The trailers (or an empty list) when the response has ended and all before them is sent; else None."""
        return self._trailers if self._ending and not self._out else None

    def take(self, limit_bytes: int) -> memoryview:
        """The next bytes to send, at most so many."""
        data = self._out.popleft()
        if len(data) > limit_bytes:
            self._out.appendleft(data[limit_bytes:])
            data = data[:limit_bytes]
        self._out_bytes -= len(data)
        self.last_moved = self.server.now
        return data

    def sent(self) -> None:
        """Some of what waited has gone."""
        self._balance()

    def _balance(self) -> None:
        paused = self._out_bytes > HTTP2_STREAM_BUFFER_BYTES
        if paused != self.write_paused:
            self.write_paused = paused
            if self.exchange is not None and self.exchange.upstream is not None:
                self.exchange.upstream.set_reading(not paused)
