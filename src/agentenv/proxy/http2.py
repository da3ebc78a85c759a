"""One client connection that speaks HTTP/2: frames in and out, windows, and the deadlines of its streams.

The protocol itself is the `h2` library's; this module moves its bytes and bounds what a peer can make us hold or do.

Invariants:
- Every stream is routed by its own fields; streams share nothing but the connection.
- Data leaves only as the peer's windows and its socket allow; streams that wait take turns.
- A peer that breaks the protocol, resets streams in floods or reads none of our answers loses the connection, nothing else does.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from h2 import events
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hyperframe.frame import GoAwayFrame

from agentenv.proxy.http2_heads import Fields
from agentenv.proxy.http2_library import FrameLengths, make_h2
from agentenv.proxy.http2_stream import Http2Stream
from agentenv.proxy.limits import (
    HTTP2_CONNECTION_WINDOW_BYTES,
    HTTP2_CONTROL_BYTES_MAX,
    HTTP2_RESETS_MAX,
    HTTP2_RESETS_WINDOW_S,
    WRITE_HIGH_BYTES,
    WRITE_LOW_BYTES,
)

if TYPE_CHECKING:
    from agentenv.proxy.server import ProxyServer

_TURN_BYTES = 64 * 1024  # what one stream sends before the next has its turn
_READ_BYTES = 32 * 1024  # what one connection takes in before the others have their turn: some 3000 of the smallest frames


class Http2Connection(asyncio.Protocol):
    """See the module. Takes over a transport on which the client has chosen HTTP/2."""

    def __init__(self, server: ProxyServer, transport: asyncio.Transport, host: str, proto: bytes) -> None:
        self.server = server
        self.transport = transport
        self.host = host
        self.host_bytes = host.encode("latin-1") or b"unknown"
        self.proto = proto
        self.last_moved = server.now
        self.write_paused = False
        self._began = server.now
        self._h2 = make_h2(client_side=False)
        self._lengths = FrameLengths(from_client=True)
        self._streams: dict[int, Http2Stream] = {}
        self._waiting: dict[int, Http2Stream] = {}
        self._credit_bytes = 0
        self._unread = bytearray()
        self._resets: deque[float] = deque(maxlen=HTTP2_RESETS_MAX)
        self._leaving = False
        self._last_stream_id = 0
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        transport.set_protocol(self)
        self._flush()

    # Called by the loop

    def data_received(self, data: bytes) -> None:
        """Called by the loop. Small frames are dear, so that a lot of bytes is taken in turns with the other connections."""
        self.last_moved = self.server.now
        if len(data) <= _READ_BYTES and not self._unread:
            self._read(data)
            return
        if not self._unread:
            self.transport.pause_reading()
            self.server.loop.call_soon(self._read_on)
        self._unread += data

    def _read_on(self) -> None:
        if self.transport.is_closing():
            return
        data = bytes(self._unread[:_READ_BYTES])
        del self._unread[:_READ_BYTES]
        self._read(data)
        if self.transport.is_closing():
            return
        if self._unread:
            self.server.loop.call_soon(self._read_on)
        else:
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        if self._lengths.exceed(data):
            self._goaway(ErrorCodes.FRAME_SIZE_ERROR)
            self._end("http2_error")
            return
        try:
            found = self._h2.receive_data(data)
        except ProtocolError:
            self._end("http2_error")  # the library has put a GOAWAY with the reason before our last bytes
            return
        for event in found:
            self._handle(event)
            if self.transport.is_closing():
                return
        self._flush()

    def eof_received(self) -> bool:
        """Called by the loop: HTTP/2 knows no half-closed connections."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.server.forget(self)
        self._drop_streams("client_gone")

    def pause_writing(self) -> None:
        """Called by the loop when the client is slow."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """Called by the loop when the client has caught up."""
        self.write_paused = False
        self._take_turns()

    # Frames from the client

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.RequestReceived):
            self._open(event)
        elif isinstance(event, events.DataReceived):
            self._data(event)
        elif isinstance(event, events.WindowUpdated | events.RemoteSettingsChanged):
            self._take_turns()
        elif isinstance(event, events.TrailersReceived | events.StreamEnded):
            self._request_ended(event)
        elif isinstance(event, events.StreamReset):
            self._reset_by_peer(event.stream_id)
        elif isinstance(event, events.ConnectionTerminated):
            self._end("client_gone")

    def _open(self, event: events.RequestReceived) -> None:
        stream_id = event.stream_id
        self._last_stream_id = max(self._last_stream_id, stream_id)
        if self._leaving:
            self._h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)  # not acted upon: the client may try elsewhere
            return
        stream = self._streams[stream_id] = Http2Stream(self, stream_id)
        stream.start(event.headers or [], ended=event.stream_ended is not None)

    def _data(self, event: events.DataReceived) -> None:
        charged = event.flow_controlled_length or 0
        self._credit_bytes += charged
        if self._credit_bytes * 2 >= HTTP2_CONNECTION_WINDOW_BYTES:
            self._h2.increment_flow_control_window(self._credit_bytes)
            self._credit_bytes = 0
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            stream.data(event.data or b"", charged)

    def _request_ended(self, event: events.TrailersReceived | events.StreamEnded) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None and not stream.request_ended:
            stream.end(cast(Fields, event.headers or []) if isinstance(event, events.TrailersReceived) else [])

    def _reset_by_peer(self, stream_id: int) -> None:
        self._count_reset()
        self._waiting.pop(stream_id, None)
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.gone("client_gone")
            self._rest()

    def _count_reset(self) -> None:
        """Resets cost a peer nothing, and us a routing and a dial: too many at once end the connection."""
        now, resets = self.server.now, self._resets
        resets.append(now)
        if len(resets) == HTTP2_RESETS_MAX and now - resets[0] < HTTP2_RESETS_WINDOW_S:
            self._goaway(ErrorCodes.ENHANCE_YOUR_CALM)
            self._end("http2_resets")

    # For the streams

    def send_headers(self, stream: Http2Stream, fields: Fields, ended: bool) -> None:
        """Send a head, which no window holds back."""
        if stream.stream_id in self._streams and self._send(lambda h2: h2.send_headers(stream.stream_id, fields, end_stream=ended)):
            self._flush()

    def credit(self, stream: Http2Stream, size_bytes: int) -> None:
        """Let the peer send so many bytes more on the stream."""
        if stream.request_ended or stream.stream_id not in self._streams:
            return
        if self._send(lambda h2: h2.increment_flow_control_window(size_bytes, stream.stream_id)):
            self._flush()

    def pump(self, stream: Http2Stream) -> None:
        """Send what waits on the stream, as far as it may go now."""
        while stream.waits_to_send and not self.write_paused and self._turn(stream):
            pass
        if stream.waits_to_send and stream.stream_id in self._streams:
            self._waiting[stream.stream_id] = stream

    def stream_done(self, stream: Http2Stream) -> None:
        """The response has been sent to its end; a request that goes on is of no use any more (RFC 9113 section 8.1)."""
        self._waiting.pop(stream.stream_id, None)
        if self._streams.pop(stream.stream_id, None) is None:
            return
        if not stream.request_ended:
            self._send(lambda h2: h2.reset_stream(stream.stream_id, ErrorCodes.NO_ERROR))
        self._flush()
        self._rest()

    def reset_stream(self, stream: Http2Stream, code: int) -> None:
        """Break a stream off."""
        self._waiting.pop(stream.stream_id, None)
        if self._streams.pop(stream.stream_id, None) is None or self.transport.is_closing():
            return
        self._send(lambda h2: h2.reset_stream(stream.stream_id, code))
        self._flush()
        self._rest()

    def _take_turns(self) -> None:
        """Let the streams that wait send in turn, until none can."""
        moved = True
        while moved and self._waiting and not self.write_paused:
            moved = False
            for stream_id, stream in list(self._waiting.items()):
                if self.write_paused or self.transport.is_closing():
                    return
                if self._waiting.pop(stream_id, None) is None:
                    continue
                moved = self._turn(stream) or moved
                if stream.waits_to_send and stream_id in self._streams:
                    self._waiting[stream_id] = stream

    def _turn(self, stream: Http2Stream) -> bool:
        """Send one turn's worth of a stream; true if anything went."""
        if stream.stream_id not in self._streams:
            return False
        before = stream.waiting_bytes
        if not self._send(lambda h2: self._send_data(h2, stream)):
            return False  # reset by the peer: we are about to be told
        ended = stream.trailers_due
        if ended is not None:
            self._send(lambda h2: h2.send_headers(stream.stream_id, ended, end_stream=True) if ended else h2.end_stream(stream.stream_id))
            self.stream_done(stream)
            return True
        if stream.waiting_bytes == before:
            return False
        self._flush()
        stream.sent()
        return True

    @staticmethod
    def _send_data(h2: H2Connection, stream: Http2Stream) -> None:
        budget = _TURN_BYTES
        while stream.waiting_bytes and budget > 0:
            room = min(h2.local_flow_control_window(stream.stream_id), h2.max_outbound_frame_size, budget)
            if room <= 0:
                break
            data = stream.take(room)
            budget -= len(data)
            h2.send_data(stream.stream_id, data)

    def _send(self, action: Callable[[H2Connection], None]) -> bool:
        """Do something to the library's connection; false if its stream has just ended, which an event about to be handled tells."""
        try:
            action(self._h2)
        except ProtocolError:
            return False
        return True

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if not data or self.transport.is_closing():
            return
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > HTTP2_CONTROL_BYTES_MAX:
            self.abort_exchange("http2_flood")

    # Ends

    def _rest(self) -> None:
        if self._leaving and not self._streams:
            self.transport.close()

    def _goaway(self, code: int) -> None:
        """Written past the library, for which a connection ends with its first GOAWAY, and open streams with it."""
        if not self.transport.is_closing():
            self.transport.write(GoAwayFrame(0, last_stream_id=self._last_stream_id, error_code=code).serialize())

    def _end(self, outcome: str) -> None:
        """Give up the connection after what is queued."""
        self._flush()
        self._drop_streams(outcome)
        self.transport.close()

    def _drop_streams(self, outcome: str) -> None:
        streams, self._streams = self._streams, {}
        self._waiting.clear()
        for stream in streams.values():
            stream.gone(outcome)

    def close_idle(self) -> None:
        """Take no more streams, and close when the last has ended."""
        if not self._leaving:
            self._leaving = True
            self._goaway(ErrorCodes.NO_ERROR)
        self._rest()

    def abort(self, reset: bool) -> None:
        """Close now."""
        if reset:
            sock = self.transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.transport.abort()

    def abort_exchange(self, outcome: str) -> None:
        """Give up the client and all its streams."""
        self._drop_streams(outcome)
        self.abort(reset=True)

    # Deadlines

    @property
    def active_exchanges(self) -> int:
        """Streams under way."""
        return len(self._streams)

    @property
    def unwatched_fd(self) -> int:
        """Never one: what the client sends is always read, because windows bound it."""
        return -1

    def peer_gone(self, hung_up: bool) -> None:
        """Not called, see `unwatched_fd`."""

    def check(self, now: float) -> None:
        """Enforce the deadlines; called by the server's sweep."""
        settings = self.server.settings
        for stream in list(self._streams.values()):
            if now - stream.last_moved > settings.stream_idle_s:
                stream.gone("idle")
                stream.reset(ErrorCodes.CANCEL)
        limit_s = settings.keepalive_idle_s if self._last_stream_id else settings.head_timeout_s
        if not self._streams and now - self.last_moved > limit_s:
            if self.transport.get_write_buffer_size():
                self.abort(reset=True)
            else:
                self.close_idle()
