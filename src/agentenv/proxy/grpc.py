"""gRPC: an exchange between a stream of a client's HTTP/2 connection and a stream to an HTTP/2 server in the sandbox, because only
HTTP/2 carries its trailers and its calls that talk both ways at once.

Invariants: finding the sandbox, admission and ends are those of every exchange; a response's head, body and trailers pass as they come,
an END_STREAM on the head included (gRPC tells by it that there will be no message); a call that does not end by END_STREAM ends as a
reset, with the code of the reset behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from agentenv.proxy import pages
from agentenv.proxy.exchange import Exchange
from agentenv.proxy.heads import HOP_BY_HOP, RequestHead, upstream_request_head
from agentenv.proxy.http2_heads import Fields, upstream_fields
from agentenv.proxy.http2_upstream import Http2Upstream
from agentenv.proxy.routes import SandboxTarget
from agentenv.proxy.upstream import UpstreamConnection

if TYPE_CHECKING:
    from agentenv.proxy.http2_stream import Http2Stream


class GrpcExchange(Exchange):
    """See the module."""

    __slots__ = ("_request_trailers", "_stream")

    upstream_kind: ClassVar[type[UpstreamConnection]] = Http2Upstream

    def __init__(self, stream: Http2Stream, head: RequestHead, target: SandboxTarget) -> None:
        super().__init__(stream, head, target)
        self._stream = stream
        self._request_trailers: Fields | None = [] if not head.has_body else None

    # The request, towards the upstream

    def _attach(self, upstream: UpstreamConnection) -> None:
        if not self._take(upstream):
            return
        server, stream = cast(Http2Upstream, upstream), self._stream
        forwarding = self._forwarding()
        host = forwarding.mask_host or self.head.host
        fields = upstream_fields(self.head, upstream_request_head(self.head, forwarding), host)
        server.begin(fields, ended=not self.head.has_body)
        if stream.pending:
            data, stream.pending = stream.pending, b""
            self._body_sent = True
            server.send(data)
        if self.head.has_body and self._request_trailers is not None and self.upstream is server:
            server.finish(self._request_trailers)
        stream.update_reading()

    @property
    def request_done(self) -> bool:
        """Whether the whole request has been handed to the upstream."""
        return self.upstream is not None and self._request_trailers is not None

    def client_data(self, data: bytes) -> None:
        """Body bytes from the client."""
        if self.upstream is None:
            self._stream.pending += data
        else:
            self._body_sent = True
            cast(Http2Upstream, self.upstream).send(data)

    def client_end(self, trailers: Fields) -> None:
        """The client has ended the request."""
        self._request_trailers = trailers
        if self.upstream is not None:
            cast(Http2Upstream, self.upstream).finish(trailers)

    # The response, towards the client

    def interim(self, fields: Fields) -> None:
        """A head before the final one."""
        self._answered = True
        self._stream.send_fields(_clean(fields), ended=False)

    def response(self, fields: Fields, ended: bool) -> None:
        """The final head."""
        self._answered = self.response_started = True
        stream = self._stream
        if ended:
            self._let_go()
        stream.send_fields(_clean(fields), ended)

    def response_data(self, data: bytes) -> None:
        """Body bytes from the server."""
        self._stream.last_moved = self._stream.server.now
        self._stream.write(data)

    def response_ended(self, trailers: Fields) -> None:
        """The response is complete."""
        self._let_go()
        self._stream.finish(_clean(trailers))

    def _let_go(self) -> None:
        """The call is over: keep the connection for the next one, if the request is over as well."""
        upstream, self.upstream = self.upstream, None
        self._stream.exchange = None
        self._stream.server.count("completed")
        if upstream is None:
            return
        server = cast(Http2Upstream, upstream)
        server.exchange = None
        if self._request_trailers is not None and server.may_be_kept:
            self._stream.server.pool.put(server, self._stream.server.now)
        else:
            server.reset()

    # Ends of all kinds

    def upstream_reset(self, code: int) -> None:
        """The server has given the call up: so do we, with its words."""
        self.leave("upstream_reset")
        self._stream.reset(code)

    def not_http2(self) -> None:
        """The server has answered something else."""
        if self.response_started:
            self._break_off("upstream_broke")
        else:
            self.client.server.count("upstream_broke")
            self._refuse(pages.upstream_failed(self._sandbox_id, "does not speak HTTP/2 without TLS, which gRPC needs"))


def _clean(fields: Fields) -> Fields:
    """Without what concerns one connection only; `h2` has checked the rest."""
    return [(bytes(name), bytes(value)) for name, value in fields if name not in HOP_BY_HOP]
