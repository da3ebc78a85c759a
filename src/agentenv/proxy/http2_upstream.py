"""A connection to a server in a sandbox that speaks HTTP/2 without TLS (RFC 9113 section 3.3), for one stream at a time.

Invariants:
- One call at a time, then kept for the next: calls hold each other up nowhere, and every window is one call's own.
- The server gets window for what the client has room for; what waits for the server's window is bounded by asking the client to wait.
- Reading never stops, because the server's windows and answers to us come the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, cast

from h2 import events
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from agentenv.proxy.http2_heads import Fields
from agentenv.proxy.http2_library import FrameLengths, make_h2
from agentenv.proxy.limits import HTTP2_STREAM_BUFFER_BYTES
from agentenv.proxy.pool import UpstreamPool
from agentenv.proxy.routes import Route
from agentenv.proxy.upstream import UpstreamConnection

if TYPE_CHECKING:
    from agentenv.proxy.grpc import GrpcExchange


class Http2Upstream(UpstreamConnection):
    """See the module; its exchange is a `GrpcExchange`."""

    __slots__ = ("_ending", "_h2", "_lengths", "_out", "_out_bytes", "_owed_bytes", "_retired", "_socket_full", "_stream_id")

    def __init__(self, key: Hashable, route: Route, pool: UpstreamPool, sock: socket.socket) -> None:
        super().__init__(key, route, pool, sock)
        self._h2: H2Connection = make_h2(client_side=True)
        self._lengths = FrameLengths(from_client=False)
        self._stream_id = 0
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._owed_bytes = 0
        self._ending: Fields | None = None
        self._retired = False
        self._socket_full = False

    # For the exchange

    def begin(self, fields: Fields, ended: bool) -> None:
        """Open the next stream."""
        self._stream_id = self._h2.get_next_available_stream_id()
        self._owed_bytes = 0
        self._do(lambda h2: h2.send_headers(self._stream_id, fields, end_stream=ended))

    def send(self, data: bytes) -> None:
        """Send request bytes, as far as the server's window allows; the rest waits."""
        self._out.append(memoryview(data))
        self._out_bytes += len(data)
        self._pump()

    def finish(self, trailers: Fields) -> None:
        """End the request after what waits."""
        self._ending = trailers
        self._pump()

    @property
    def may_be_kept(self) -> bool:
        """Whether another call may follow: the one before is over on both sides and the server goes on."""
        return not (self._retired or self._out or self._ending is not None or self.transport.is_closing())

    def set_reading(self, wanted: bool) -> None:
        """Give the server window for what it has sent, if the client has room."""
        owed = self._owed_bytes
        if wanted and owed:
            self._owed_bytes = 0
            self._do(lambda h2: h2.increment_flow_control_window(owed, self._stream_id))

    # Called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        super().connection_made(transport)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        found: list[events.Event] | None = None
        if not self._lengths.exceed(data):
            with contextlib.suppress(ProtocolError):
                found = self._h2.receive_data(data)
        if found is None:
            if self._call is not None:
                self._call.not_http2()
            else:
                self._drop_idle()
            return
        for event in found:
            self._handle(event)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        super().connection_lost(None)

    def pause_writing(self) -> None:
        """Called by the loop when the server is slow."""
        self._socket_full = True
        self._balance()

    def resume_writing(self) -> None:
        """Called by the loop when the server has caught up."""
        self._socket_full = False
        self._pump()

    # Frames from the server

    @property
    def _call(self) -> GrpcExchange | None:
        return cast("GrpcExchange | None", self.exchange)

    def _handle(self, event: events.Event) -> None:
        call = self._call
        if isinstance(event, events.WindowUpdated | events.RemoteSettingsChanged):
            self._pump()
        elif isinstance(event, events.ConnectionTerminated):
            self._retired = True
            if call is not None:
                call.upstream_lost()
            else:
                self._drop_idle()
        elif isinstance(event, events.DataReceived):
            self._data(event)
        elif call is None or getattr(event, "stream_id", 0) != self._stream_id:
            return
        elif isinstance(event, events.ResponseReceived):
            call.response(cast(Fields, event.headers or []), ended=event.stream_ended is not None)
        elif isinstance(event, events.InformationalResponseReceived):
            call.interim(cast(Fields, event.headers or []))
        elif isinstance(event, events.TrailersReceived):
            call.response_ended(cast(Fields, event.headers or []))
        elif isinstance(event, events.StreamEnded):
            call.response_ended([])
        elif isinstance(event, events.StreamReset):
            self._retired = True  # what it had to say about the call is said; a fresh connection is the safer start for the next
            call.upstream_reset(int(event.error_code or 0))

    def _data(self, event: events.DataReceived) -> None:
        charged = event.flow_controlled_length or 0
        self._do(lambda h2: h2.increment_flow_control_window(charged) if charged else None)
        call = self._call
        if call is None or event.stream_id != self._stream_id:
            return
        self._owed_bytes += charged
        call.response_data(event.data or b"")
        if self.exchange is call:
            self.set_reading(not call.client.write_paused)

    # Frames to the server

    def _pump(self) -> None:
        if self._out and not self._socket_full:
            self._do(self._send_data)
        if not self._out and self._ending is not None:
            trailers, self._ending = self._ending, None
            self._do(lambda h2: h2.send_headers(self._stream_id, trailers, end_stream=True) if trailers else h2.end_stream(self._stream_id))
        self._balance()

    def _send_data(self, h2: H2Connection) -> None:
        while self._out:
            room = min(h2.local_flow_control_window(self._stream_id), h2.max_outbound_frame_size)
            if room <= 0:
                return
            data = self._out.popleft()
            if len(data) > room:
                self._out.appendleft(data[room:])
                data = data[:room]
            self._out_bytes -= len(data)
            h2.send_data(self._stream_id, data)

    def _balance(self) -> None:
        full = self._socket_full or self._out_bytes > HTTP2_STREAM_BUFFER_BYTES
        if full != self.write_paused:
            self.write_paused = full
            if self.exchange is not None:
                self.exchange.client.update_reading()

    def _do(self, action: Callable[[H2Connection], object]) -> None:
        """Do something to the library's connection. An error means that the call has just ended, which an event is about to tell."""
        try:
            action(self._h2)
        except ProtocolError:
            return
        self._flush()

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def reset(self, code: int = ErrorCodes.CANCEL) -> None:
        """Tell the server that the call is given up, and close."""
        if not self.transport.is_closing():
            self._do(lambda h2: h2.reset_stream(self._stream_id, code))
        self.close(1.0)
