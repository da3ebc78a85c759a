"""One request and its response: joins a client connection to an upstream connection and moves the bytes between them.

Invariants:
- The response goes out as it comes in: nothing waits for more, nothing is re-encoded (but for HTTP/1.0 clients, which know no chunks).
- A response that does not end by its own framing ends as a broken connection, never tidily (contract section 3.5).
- A request is sent again only if its upstream connection was a kept one that died before any answer, and no body byte was sent, and
  either a body is still owed (so the server cannot have acted) or the method may be repeated.
- An exchange ends once: it leaves both connections, and whatever arrives on them later finds no exchange.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, Protocol

from agentenv.proxy import pages
from agentenv.proxy.chunked import BodyScanner, ChunkScanner, FramingError, LengthBody, UntilCloseBody
from agentenv.proxy.dispatch import refusal_for
from agentenv.proxy.heads import (
    Forwarding,
    HeadError,
    RequestHead,
    ResponseHead,
    has_bare_line_feed,
    upstream_request_head,
)
from agentenv.proxy.limits import HEAD_BYTES_MAX
from agentenv.proxy.routes import ENVD_PORT, ProxyRefusal, RequestInfo, Route, SandboxTarget
from agentenv.proxy.upstream import UpstreamConnection

if TYPE_CHECKING:
    from agentenv.proxy.server import ProxyServer

_HTTP = b"HTTP/1."


class Client(Protocol):
    """Where a request comes from: an HTTP/1.1 connection, or one stream of an HTTP/2 connection."""

    server: ProxyServer
    exchange: Exchange | None
    host: str
    host_bytes: bytes
    proto: bytes
    takes_chunks: bool
    """Whether `write` may be given chunked bytes; else it gets the content alone."""
    pending: bytes
    """What has arrived and was not taken yet."""
    write_paused: bool
    eof: bool
    last_moved: float

    def response_head(self, head: ResponseHead, connection: bytes, *, chunked: bool, with_length: bool) -> bytes:
        """The bytes of a head, to be written together with what follows; empty if the head has been sent in another way."""

    def write(self, data: bytes) -> None:
        """Send, or queue and ask the upstream to wait."""

    def write_eof(self) -> None:
        """Shut the sending side of a tunnel."""

    def update_reading(self) -> None:
        """Take more from the client if, and only if, there is room for it."""

    def refuse(self, exchange: Exchange, refusal: ProxyRefusal, keep_alive: bool = True) -> None:
        """Answer in the upstream's place and end the exchange."""

    def exchange_done(self, keep_alive: bool) -> None:
        """The exchange has written its last byte."""

    def abort(self, reset: bool) -> None:
        """End the response such that the client sees it broken."""


class Exchange:
    """See the module. Made by the client's side for each request; `start` sets it off."""

    upstream_kind: ClassVar[type[UpstreamConnection]] = UpstreamConnection

    __slots__ = (
        "_answered",
        "_body_sent",
        "_buffer",
        "_client_eof",
        "_client_keep_alive",
        "_decode",
        "_route",
        "_task",
        "_upgrade",
        "_upstream_eof",
        "_upstream_keep_alive",
        "client",
        "head",
        "request_body",
        "response_body",
        "response_started",
        "target",
        "tunnel",
        "upstream",
    )

    def __init__(self, client: Client, head: RequestHead, target: SandboxTarget | None) -> None:
        self.client = client
        self.head = head
        self.target = target
        self.upstream: UpstreamConnection | None = None
        self.request_body: BodyScanner | None = None
        if head.chunked:
            self.request_body = ChunkScanner()
        elif head.content_length:
            self.request_body = LengthBody(head.content_length)
        self.response_body: BodyScanner | None = None
        self.response_started = False
        self.tunnel = False
        self._answered = False
        self._body_sent = False
        self._buffer = b""
        self._client_eof = False
        self._client_keep_alive = False
        self._decode = False
        self._route: Route | None = None
        self._task: asyncio.Task[None] | None = None
        self._upgrade = head.upgrade
        self._upstream_eof = False
        self._upstream_keep_alive = False

    # Finding an upstream

    def start(self) -> None:
        """Find the route and an upstream connection, at once if both are known. Raises ProxyRefusal."""
        server = self.client.server
        route = server.dispatcher.route_now(self.target, RequestInfo(self.head, self.client.host))
        if route is not None:
            self._route = route
            kept = server.dispatcher.take_kept(self.target, route, self.upstream_kind)
            if kept is not None:
                self._attach(kept)
                return
        self._task = server.loop.create_task(self._open())

    async def _open(self) -> None:
        """Resolve if still needed, dial, attach; every way out but success answers the client."""
        dispatcher = self.client.server.dispatcher
        try:
            route, upstream = dispatcher.successor or self._route, None
            self._route = route
            if route is None:
                assert self.target is not None
                route = self._route = await dispatcher.route_later(self.target, RequestInfo(self.head, self.client.host))
                upstream = dispatcher.take_kept(self.target, route, self.upstream_kind)
            if upstream is None:
                upstream = await dispatcher.dial(self.target, route, self.run_ended, self.upstream_kind)
        except Exception as error:  # noqa: BLE001 - whatever the route table raises becomes an answer
            self._task = None
            self._refuse(refusal_for(error))
            return
        self._task = None
        self._attach(upstream)

    # The request, towards the upstream

    def _take(self, upstream: UpstreamConnection) -> bool:
        """Make a connection this exchange's own; False when the sandbox or the connection has ended meanwhile, which is dealt with."""
        if self._route is not None and self._route.closed.fired:
            upstream.abort()
            self.run_ended()
            return False
        self.upstream = upstream
        upstream.exchange = self
        if upstream.transport.is_closing():
            self.upstream_lost()  # it died, or spoke unasked, before it was ours
            return False
        return True

    def _attach(self, upstream: UpstreamConnection) -> None:
        if not self._take(upstream):
            return
        upstream.set_reading(not self.client.write_paused)
        head = upstream_request_head(self.head, self._forwarding())
        client, body = self.client, self.request_body
        pending = client.pending
        if body is None or not pending:
            upstream.write(head)
        else:
            try:
                count = body.take(pending)
            except FramingError as error:
                self._bad_body(error)
                return
            client.pending = pending[count:]
            self._body_sent = True
            upstream.write(head + (pending if count == len(pending) else pending[:count]))
        if client.eof and not self.request_done:
            self.client_lost()
            client.abort(reset=False)
            return
        client.update_reading()

    def _forwarding(self) -> Forwarding:
        client, target, head = self.client, self.target, self.head
        mask = None
        if self._route is not None and self._route.mask_host and target is not None:
            mask = self._route.mask_host.replace("${PORT}", str(target.port)).encode("latin-1")
        guarded = target is None or target.port == ENVD_PORT
        keeps_token = guarded or (self._route is not None and self._route.through)
        if guarded and head.upgrade and head.upgrade.lower() != b"websocket":
            self._upgrade = b""  # such a tunnel would carry requests past the routing and the path guard
        return Forwarding(client.host_bytes, client.proto, client.server.settings.trust_forwarded, mask, not keeps_token, self._upgrade)

    @property
    def request_done(self) -> bool:
        """Whether the whole request has been handed to the upstream."""
        return self.upstream is not None and (self.request_body is None or self.request_body.done)

    def client_data(self, data: bytes) -> None:
        """Bytes from the client: body, tunnel, or the start of a later request."""
        client, upstream, body = self.client, self.upstream, self.request_body
        if upstream is None or (not self.tunnel and (body is None or body.done)):
            client.pending += data
            client.update_reading()
        elif self.tunnel or body is None:
            upstream.write(data)
        else:
            try:
                count = body.take(data)
            except FramingError as error:
                self._bad_body(error)
                return
            self._body_sent = True
            if count == len(data):
                upstream.write(data)
            else:
                upstream.write(data[:count])
                client.pending = data[count:]
                client.update_reading()

    def client_eof(self) -> bool:
        """The client has shut its sending side. True keeps the connection open for our answer, false means that the client is given up."""
        if self.tunnel:
            self._client_eof = True
            if self.upstream is not None and not self.upstream.transport.is_closing():
                self.upstream.transport.write_eof()
            if self._upstream_eof:
                self._end_tunnel()
            return True
        if not self.head.keep_alive and (self.upstream is None or self.request_done):
            return True  # it has announced its last request, and may well be reading
        self.client_lost()
        return False

    def client_lost(self) -> None:
        """The client is gone: so is its request."""
        self.leave("client_gone")

    # The response, towards the client

    def upstream_data(self, data: bytes) -> None:
        """Bytes from the upstream."""
        client = self.client
        client.last_moved = client.server.now
        if self.tunnel:
            client.write(data)
        elif self.response_body is not None:
            self._response_bytes(self.response_body, data)
        else:
            self._response_head(data)

    def _response_head(self, data: bytes) -> None:
        """Collect and pass on heads: any number of interim ones, then the final one."""
        self._answered = True
        assert self.upstream is not None
        heads = self.upstream.heads
        scanned = len(self._buffer)
        buffer = self._buffer + data if scanned else data
        while buffer:
            end = buffer.find(b"\r\n\r\n", max(0, scanned - 3)) + 4
            if end < 4:
                http = buffer.startswith(_HTTP) or _HTTP.startswith(buffer)
                if not http or len(buffer) > HEAD_BYTES_MAX or has_bare_line_feed(buffer, scanned):
                    self._upstream_broke("sent a malformed or oversized response head")
                    return
                break
            try:
                if end > HEAD_BYTES_MAX:
                    raise HeadError(502, "it is too large")
                head = heads.parse(buffer[:end])
            except HeadError as error:
                self._upstream_broke(f"sent a response head that cannot be passed on: {error.message}")
                return
            buffer, scanned = buffer[end:], 0
            if head.status == 101:
                self._switch(head, buffer)
                return
            if head.status >= 200:
                self._buffer = b""
                self._begin_response(head, buffer)
                return
            if self.head.minor_version == 1:
                self.client.write(self.client.response_head(head, b"", chunked=False, with_length=False))
        self._buffer = buffer

    def _begin_response(self, head: ResponseHead, rest: bytes) -> None:
        client, modern = self.client, self.head.minor_version == 1
        body: BodyScanner | None
        if self.head.method == b"HEAD" or head.status in (204, 304) or (not head.chunked and head.content_length == 0):
            body = None
        elif head.chunked:
            body = ChunkScanner()
            self._decode = not (modern and client.takes_chunks)
        elif head.content_length is not None:
            body = LengthBody(head.content_length)
        else:
            body = UntilCloseBody()
        delimited = not (self._decode or isinstance(body, UntilCloseBody))
        keep_alive = delimited and self.head.keep_alive and self.request_done and not client.server.closing
        connection = b"close" if not keep_alive else b"" if modern else b"keep-alive"
        self.response_started = True
        self.response_body = body
        self._client_keep_alive = keep_alive
        self._upstream_keep_alive = head.keep_alive and not isinstance(body, UntilCloseBody)
        out = client.response_head(head, connection, chunked=head.chunked and modern and head.status != 204, with_length=head.status != 204)
        if body is None:
            client.write(out)
            self._finish(tidy=not rest)
        elif rest:
            self._response_bytes(body, rest, out)
        else:
            client.write(out)

    def _response_bytes(self, body: BodyScanner, data: bytes, prefix: bytes = b"") -> None:
        try:
            if self._decode:
                payload: list[bytes] = []
                count = body.take(data, payload)
                out = b"".join(payload)
            else:
                count = body.take(data)
                out = data if count == len(data) else data[:count]
        except FramingError:
            self._break_off("upstream_broke")
            return
        if prefix:
            out = prefix + out
        if out:
            self.client.write(out)
        if body.done:
            self._finish(tidy=count == len(data))

    def _finish(self, tidy: bool) -> None:
        """The response is complete. `tidy` is false if the upstream sent more than it should have."""
        upstream, client = self.upstream, self.client
        if self._route is not None and self._route.heard is not None:
            self._route.heard()
        reusable = tidy and self._upstream_keep_alive and self.request_done
        self.upstream = None
        if upstream is not None:
            upstream.exchange = None
            if reusable and not upstream.transport.is_closing():
                upstream.set_reading(True)
                client.server.pool.put(upstream, client.server.now)
            else:
                upstream.abort()
        client.server.count("completed")
        client.exchange_done(self._client_keep_alive)

    # Tunnels

    def _switch(self, head: ResponseHead, rest: bytes) -> None:
        client, upstream = self.client, self.upstream
        if not self._upgrade or not head.upgrade or not self.request_done or upstream is None:
            self._upstream_broke("switched protocols unasked")
            return
        self.tunnel = self.response_started = True
        self._buffer = b""
        client.server.count("tunnel")
        client.write(client.response_head(head, b"Upgrade", chunked=False, with_length=False) + rest)
        if client.pending:
            upstream.write(client.pending)
            client.pending = b""
        client.update_reading()

    def _end_tunnel(self) -> None:
        """Both sides have said all they had: flush and close."""
        upstream, self.upstream = self.upstream, None
        client = self.client
        if upstream is not None:
            upstream.exchange = None
            upstream.close(client.server.settings.half_closed_idle_s)
        client.server.count("completed")
        client.exchange_done(False)

    # Ends of all kinds

    def upstream_eof(self) -> bool:
        """The upstream has shut its sending side. True keeps ours open."""
        if self.tunnel:
            self._upstream_eof = True
            self.client.write_eof()
            if self._client_eof:
                self._end_tunnel()
                return False
            return True
        if isinstance(self.response_body, UntilCloseBody):
            self._finish(tidy=True)
        else:
            self.upstream_lost()
        return False

    def upstream_lost(self) -> None:
        """The upstream connection is gone, or as good as gone, before the exchange was complete."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            reused = upstream.reused
            upstream.abort()
            if reused and not self._answered and not self._body_sent and (self.head.has_body or self.head.idempotent):
                self.client.server.count("retried")
                self._task = self.client.server.loop.create_task(self._open())
                return
        if self.response_started:
            self._break_off("upstream_lost")
        else:
            self.client.server.count("upstream_lost")
            self._refuse(pages.upstream_failed(self._sandbox_id, "closed the connection before it answered"))

    def run_ended(self) -> None:
        """The sandbox was killed or paused."""
        if self.client.exchange is not self:
            return  # the client has left in the same turn of the loop
        self.client.server.count("run_ended")
        self.upstream = None  # aborted by whoever called
        if self.response_started:
            self._break_off("aborted")
        else:
            self._refuse(pages.sandbox_not_found(self._sandbox_id or ""))

    def _upstream_broke(self, why: str) -> None:
        self.client.server.count("upstream_broke")
        self._refuse(pages.upstream_failed(self._sandbox_id, why))

    def _bad_body(self, error: FramingError) -> None:
        if self.response_started:
            self._break_off("bad_request")
        else:
            self._refuse(pages.plain(400, f"Malformed chunked request body: {error}"), keep_alive=False)

    def _refuse(self, refusal: ProxyRefusal, keep_alive: bool = True) -> None:
        """Answer in the upstream's place. Only before any byte of a final response."""
        self.leave(None)
        self.client.refuse(self, refusal, keep_alive)

    def _break_off(self, outcome: str) -> None:
        """End the client connection such that no client can take the response for complete.

        Always by a reset: some clients hold a mere end in mid-chunk for a fault in the protocol, not for a lost sandbox
        (the Python SDK of 2.45 then does not ask whether the sandbox is gone).
        """
        self.leave(outcome)
        self.client.abort(reset=True)

    def leave(self, outcome: str | None) -> None:
        """Let go of the upstream side, and count the outcome if there is one to count."""
        if outcome is not None:
            self.client.server.count(outcome)
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()

    @property
    def _sandbox_id(self) -> str | None:
        return None if self.target is None else self.target.sandbox_id
