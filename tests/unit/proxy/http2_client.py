"""An HTTP/2 client that sees every frame, and may break the rules."""

import asyncio
from collections import defaultdict

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from proxy_rig import SANDBOX, WAIT_S


class Answer:
    """What has arrived on one stream."""

    def __init__(self):
        self.interim = []
        self.fields = None
        self.body = b""
        self.trailers = None
        self.ended = False
        self.reset = None
        self.over = asyncio.Event()
        self.began = asyncio.Event()

    @property
    def status(self):
        return int(self.fields[":status"])


class Http2Client:
    """One connection. With `credit` false no window is given back, so the server's data stops at the initial window."""

    def __init__(self, reader, writer, *, window=None, credit=True):
        self.reader, self.writer = reader, writer
        self.h2 = H2Connection(
            H2Configuration(client_side=True, header_encoding="latin-1", validate_outbound_headers=False, normalize_outbound_headers=False)
        )
        if window is not None:
            self.h2.local_settings = Settings(client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.credit = credit
        self.answers = defaultdict(Answer)
        self.goaway = None
        self.closed = asyncio.Event()
        self.changed = asyncio.Condition()
        self.h2.initiate_connection()
        self.flush()
        self.task = asyncio.create_task(self._read())

    def flush(self):
        data = self.h2.data_to_send()
        if data and not self.writer.is_closing():
            self.writer.write(data)

    async def _read(self):
        try:
            while data := await self.reader.read(65536):
                for event in self.h2.receive_data(data):
                    self._handle(event)
                self.flush()
                async with self.changed:
                    self.changed.notify_all()
        except OSError:
            pass
        finally:
            self.closed.set()
            for answer in self.answers.values():
                answer.over.set()
                answer.began.set()
            async with self.changed:
                self.changed.notify_all()

    def _handle(self, event):
        if isinstance(event, events.ConnectionTerminated):
            self.goaway = event
            return
        answer = self.answers[getattr(event, "stream_id", 0)]
        if isinstance(event, events.ResponseReceived):
            answer.fields = dict(event.headers)
            answer.began.set()
        elif isinstance(event, events.InformationalResponseReceived):
            answer.interim.append(dict(event.headers))
        elif isinstance(event, events.DataReceived):
            answer.body += event.data
            if self.credit:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, events.TrailersReceived):
            answer.trailers = dict(event.headers)
        elif isinstance(event, events.StreamEnded):
            answer.ended = True
            answer.over.set()
        elif isinstance(event, events.StreamReset):
            answer.reset = event.error_code
            answer.over.set()
            answer.began.set()

    def begin(self, fields, end=False):
        """Open a stream; returns its id."""
        stream_id = self.h2.get_next_available_stream_id()
        self.answers[stream_id] = Answer()
        self.h2.send_headers(stream_id, fields, end_stream=end)
        self.flush()
        return stream_id

    async def send(self, stream_id, data, end=False):
        """Send body bytes as the windows allow."""
        view = memoryview(data)
        while len(view):
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size, len(view))
            if room:
                self.h2.send_data(stream_id, bytes(view[:room]))
                view = view[room:]
                self.flush()
            else:
                async with self.changed:
                    await asyncio.wait_for(self.changed.wait(), WAIT_S)
        if end:
            self.h2.end_stream(stream_id)
            self.flush()
        await self.writer.drain()

    async def answer(self, stream_id):
        """The whole response."""
        await asyncio.wait_for(self.answers[stream_id].over.wait(), WAIT_S)
        return self.answers[stream_id]

    async def ask(self, fields, body=b"", trailers=None):
        stream_id = self.begin(fields, end=not body and trailers is None)
        if body:
            await self.send(stream_id, body, end=trailers is None)
        if trailers is not None:
            self.h2.send_headers(stream_id, trailers, end_stream=True)
            self.flush()
        return await self.answer(stream_id)

    def close(self):
        self.task.cancel()
        self.writer.transport.abort()


def fields(upstream=None, method="GET", path="/", extra=(), sandbox=SANDBOX, authority="app.test"):
    """A request routed by headers, or to the API without `upstream`."""
    found = [(":method", method), (":scheme", "http"), (":authority", authority), (":path", path)]
    if upstream is not None:
        port = upstream if isinstance(upstream, int) else upstream.port
        found += [("e2b-sandbox-id", sandbox), ("e2b-sandbox-port", str(port))]
    return found + list(extra)
