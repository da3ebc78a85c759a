"""Parts for the proxy tests: a scriptable upstream, a route table over loopback ports, and a client that sees every byte."""

import asyncio
import contextlib
import re
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.proxy import CloseSignal, ProxyServer, ProxySettings, Route, pages
from agentenv.proxy.guard import check_traffic_token

SANDBOX = "iabcdefghij0123456789"
WAIT_S = 10.0


class Peer:
    """One end of a TCP connection with everything it has received so far."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.buffer = b""
        self.received = b""

    async def more(self, count=65536):
        data = await asyncio.wait_for(self.reader.read(count), WAIT_S)
        self.buffer += data
        self.received += data
        return data

    async def until(self, marker):
        while marker not in self.buffer:
            if not await self.more():
                raise EOFError(f"closed before {marker!r}; got {self.buffer[-200:]!r}")
        head, _, self.buffer = self.buffer.partition(marker)
        return head + marker

    async def exactly(self, count):
        while len(self.buffer) < count:
            if not await self.more():
                raise EOFError(f"closed after {len(self.buffer)} of {count} bytes")
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data

    async def rest(self):
        """All bytes up to a tidy end; a reset raises ConnectionError."""
        while await self.more():
            pass
        data, self.buffer = self.buffer, b""
        return data

    async def head(self):
        return Head(await self.until(b"\r\n\r\n"))

    async def body(self, head):
        """Raw body bytes as framed by `head`."""
        if "transfer-encoding" in head:
            return await self.chunked()
        return await self.exactly(int(head.get("content-length", "0")))

    async def chunked(self):
        raw = b""
        while True:
            line = await self.until(b"\r\n")
            raw += line
            size = int(line.split(b";")[0], 16)
            if size == 0:
                while line != b"\r\n":
                    line = await self.until(b"\r\n")
                    raw += line
                return raw
            raw += await self.exactly(size + 2)

    async def send(self, data):
        if self.writer.is_closing():
            raise ConnectionResetError("already closed")
        self.writer.write(data)
        await self.writer.drain()

    async def send_bytewise(self, data, step=1):
        for pos in range(0, len(data), step):
            self.writer.write(data[pos : pos + step])
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def ask(self, request, head_only=False):
        """Send a request and read the whole response."""
        await self.send(request)
        head = await self.head()
        head.body = b"" if head_only else await self.body(head)
        return head

    def reset(self):
        """Close with RST."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:  # once the other side has closed: uvloop has none, asyncio a closed one
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self):
        self.writer.transport.abort()


class Head(dict):
    """First line and fields of a message; names in lower case, repeated fields joined by newlines."""

    def __init__(self, raw):
        super().__init__()
        self.raw = raw
        self.body = b""
        lines = raw.decode("latin-1").split("\r\n")
        self.line = lines[0]
        for line in lines[1:-2]:
            name, _, value = line.partition(":")
            name = name.lower()
            self[name] = self[name] + "\n" + value.strip() if name in self else value.strip()

    @property
    def status(self):
        return int(self.line.split(" ")[1])


class Upstream:
    """A server whose connections run `script(peer)`; by default it answers every request with an echo of it."""

    def __init__(self, script=None):
        self.script = script or echo
        self.peers = []
        self.tasks = []
        self.errors = []

    async def start(self, path=None):
        if path is None:
            self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 16)
            self.port = self.server.sockets[0].getsockname()[1]
        else:
            self.server = await asyncio.start_unix_server(self._serve, str(path))
        return self

    async def _serve(self, reader, writer):
        peer = Peer(reader, writer)
        self.peers.append(peer)
        self.tasks.append(asyncio.current_task())
        try:
            await self.script(peer)
        except (EOFError, ConnectionError):
            pass
        except Exception as error:
            self.errors.append(error)
            raise
        finally:
            with contextlib.suppress(Exception):
                writer.close()

    async def stop(self):
        self.server.close()
        for task in self.tasks:
            task.cancel()
        for peer in self.peers:
            peer.close()
        await asyncio.sleep(0)


async def echo(peer):
    """Answer each request with its head and raw body, as text/plain."""
    while True:
        head = await peer.head()
        body = await peer.body(head)
        answer = head.raw + body
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + (b"" if head.line.startswith("HEAD") else answer))


def replies(*answers):
    """A script that reads one request per answer and sends it; answers may be bytes or async functions of the peer."""

    async def script(peer):
        for answer in answers:
            head = await peer.head()
            await peer.body(head)
            if callable(answer):
                await answer(peer)
            else:
                await peer.send(answer)

    return script


def answer(body=b"ok", extra=b""):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), extra, body)


@dataclass
class Sandbox:
    closed: CloseSignal = field(default_factory=CloseSignal)
    token: str | None = None
    mask_host: str | None = None


class Table:
    """Sandboxes whose ports are the loopback ports of this host."""

    def __init__(self):
        self.sandboxes = {SANDBOX: Sandbox()}
        self.resolve_delay_s = 0.0
        self.resolved = 0
        self.dials = 0
        self.heard = 0
        self.resumed = 0
        self.error = None

    def kill(self, sandbox_id=SANDBOX):
        self.sandboxes.pop(sandbox_id).closed.fire()

    async def resolve(self, target, request):
        self.resolved += 1
        if self.error is not None:
            raise self.error
        if target.sandbox_id not in self.sandboxes:
            raise pages.sandbox_not_found(target.sandbox_id)
        sandbox = self.sandboxes[target.sandbox_id]
        check_traffic_token(target, request, sandbox.token)
        if self.resolve_delay_s:
            await asyncio.sleep(self.resolve_delay_s)
            self.resumed += 1
        return self.route(sandbox, target)

    def route(self, sandbox, target):
        async def dial():
            self.dials += 1
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(("127.0.0.1", target.port))
            return sock

        def heard():
            self.heard += 1

        return Route(dial, sandbox.closed, mask_host=sandbox.mask_host, traffic_token=sandbox.token, heard=heard)


class FastTable(Table):
    """The same, answering without a task."""

    def resolve_now(self, target, request):
        self.resolved += 1
        sandbox = self.sandboxes.get(target.sandbox_id)
        return None if sandbox is None else self.route(sandbox, target)


class Rig:
    """A proxy, its table, its API upstream, and everything to be closed at the end."""

    def __init__(self, tmp_path: Path):
        self.api_path = tmp_path / "api.sock"
        self.table = Table()
        self.closers = []

    async def start(self, **settings):
        settings.setdefault("sweep_interval_s", 0.05)
        settings.setdefault("domains", ("sbx.test",))
        self.proxy = ProxyServer(self.table, self.api_path, ProxySettings(**settings))
        self.port = await self.proxy.start("127.0.0.1", 0)
        return self

    async def upstream(self, script=None):
        upstream = await Upstream(script).start()
        self.closers.append(upstream)
        return upstream

    async def api(self, script=None):
        upstream = await Upstream(script).start(self.api_path)
        self.closers.append(upstream)
        return upstream

    async def client(self, **options):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        peer = Peer(reader, writer)
        self.closers.append(peer)
        return peer

    def outcomes(self):
        return self.proxy.stats().outcomes

    async def settle(self, check, within_s=5.0):
        """Wait for `check()` to become true; fails with its last value otherwise."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while not check():
            assert loop.time() < until, f"not within {within_s} s; {self.proxy.stats()}"
            await asyncio.sleep(0.01)

    async def stop(self):
        for closer in self.closers:
            if isinstance(closer, Upstream):
                await closer.stop()
            else:
                closer.close()
        if hasattr(self, "proxy"):
            await self.proxy.close(0)
        for closer in self.closers:
            assert not getattr(closer, "errors", []), closer.errors


def request(upstream, method="GET", path="/", extra="", body=b"", sandbox=SANDBOX, version="1.1"):
    """A raw request routed by headers."""
    port = upstream if isinstance(upstream, int) else upstream.port
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    head = (
        f"{method} {path} HTTP/{version}\r\nHost: app.test\r\nE2b-Sandbox-Id: {sandbox}\r\nE2b-Sandbox-Port: {port}\r\n{length}{extra}\r\n"
    )
    return head.encode("latin-1") + body


def chunks(*parts, trailers=b"", extension=b""):
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n" + trailers + b"\r\n"


def dechunk(raw):
    """A simple reference decoder for well-formed chunked bytes."""
    out = b""
    while True:
        line, _, raw = raw.partition(b"\r\n")
        size = int(re.match(rb"[0-9a-fA-F]+", line)[0], 16)
        if not size:
            return out
        out, raw = out + raw[:size], raw[size + 2 :]
