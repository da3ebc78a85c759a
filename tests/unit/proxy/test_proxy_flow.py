"""Flow: first bytes at once, slow sides hold the fast ones back, memory stays flat."""

import asyncio
import hashlib
import re
import socket
import threading
import time
from pathlib import Path

import pytest
from proxy_rig import chunks, request

from agentenv.proxy.connection import ClientConnection

MIB = 1 << 20
RSS_GROWTH_MAX_BYTES = 24 * MIB


def peak_rss_bytes():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
async def test_events_arrive_as_they_are_sent(rig, framing):
    """The upstream sends an event only when the client has the one before: a proxy that waits for more would wait for ever."""
    arrived = asyncio.Event()
    head = {"chunked": b"Transfer-Encoding: chunked\r\n", "close": b"", "length": b"Content-Length: 45\r\n"}[framing]

    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + head + b"\r\n")
        for number in range(5):
            event = b"data: %d\n\n" % number
            await peer.send(b"%x\r\n%s\r\n" % (len(event), event) if framing == "chunked" else event)
            await asyncio.wait_for(arrived.wait(), 20)
            arrived.clear()
        if framing == "chunked":
            await peer.send(b"0\r\n\r\n")

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream))
    await client.head()
    for number in range(5):
        await client.until(b"data: %d\n\n" % number)
        arrived.set()


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_slow_reader_blocks_the_sender_and_nobody_else(rig, framing):
    sent = 0

    async def script(peer):
        nonlocal sent
        await peer.head()
        head = b"Content-Length: 1000000000" if framing == "length" else b"Transfer-Encoding: chunked"
        await peer.send(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        block = b"y" * 65536 if framing == "length" else b"10000\r\n" + b"y" * 65536 + b"\r\n"
        while True:
            await peer.send(block)
            sent += len(block)

    await rig.start()
    endless, other = await rig.upstream(script), await rig.upstream()
    reader = await rig.client(limit=1024)
    await reader.send(request(endless))
    await reader.until(b"\r\n\r\n")
    before, last, stalled = peak_rss_bytes(), -1, 0
    while stalled < 10:
        await asyncio.sleep(0.03)
        stalled, last = (stalled + 1, last) if sent == last else (0, sent)
    assert sent < 64 * MIB  # kernel buffers, not ours
    for _ in range(20):  # drip on: the sender moves only as far as the reader
        await reader.more(1024)
    assert sent - last < 8 * MIB
    assert peak_rss_bytes() - before < RSS_GROWTH_MAX_BYTES
    quick = await rig.client()
    began = time.monotonic()
    for _ in range(20):
        await quick.ask(request(other))
    assert (time.monotonic() - began) / 20 < 0.05
    rig.table.kill()  # works at once on a stalled stream
    await rig.settle(lambda: endless.peers[0].writer.is_closing() or endless.peers[0].reader.exception(), 2)


async def test_slow_upstream_blocks_the_client(rig):
    go_on = asyncio.Event()
    digest = hashlib.sha256()

    async def script(peer):
        head = await peer.head()
        await go_on.wait()
        left = int(head["content-length"])
        digest.update(peer.buffer)
        left -= len(peer.buffer)
        while left:
            data = await peer.reader.read(MIB)
            digest.update(data)
            left -= len(data)
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    block = bytes(range(256)) * 4096
    expected, accepted = hashlib.sha256(), 0

    async def send():
        nonlocal accepted
        await client.send(request(upstream, "POST", extra=f"Content-Length: {64 * len(block)}\r\n"))
        for _ in range(64):
            expected.update(block)
            await client.send(block)
            accepted += len(block)

    sending = asyncio.create_task(send())
    last, stalled = -1, 0
    while stalled < 10:
        await asyncio.sleep(0.03)
        stalled, last = (stalled + 1, last) if accepted == last else (0, accepted)
    assert accepted < 48 * MIB
    go_on.set()
    assert (await client.head()).status == 200
    await sending
    assert digest.digest() == expected.digest()


def serve_blocks(listener, total, chunked):
    """A blocking server for one connection: a body of `total` bytes down, in big writes."""
    sock, _ = listener.accept()
    with sock:
        while not sock.recv(65536).endswith(b"\r\n\r\n"):
            pass
        block = b"z" * MIB
        if chunked:
            sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            framed = b"100000\r\n" + block + b"\r\n"
        else:
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
            framed = block
        for _ in range(total // MIB):
            sock.sendall(framed)
        if chunked:
            sock.sendall(b"0\r\n\r\n")
        sock.recv(1)


def swallow(port, message, total):
    """A blocking client: returns how many body bytes came (with chunk framing, if any)."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(60)
        sock.sendall(message)
        buffer, count = bytearray(MIB), 0
        while count < total:
            got = sock.recv_into(buffer)
            if not got:
                break
            count += got
        return count


@pytest.mark.parametrize("chunked", [False, True])
async def test_big_download_in_flat_memory(rig, chunked):
    total = 512 * MIB
    await rig.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve_blocks, args=(listener, total, chunked), daemon=True)
        server.start()
        forget_peak()
        before = peak_rss_bytes()
        count = await asyncio.to_thread(swallow, rig.port, request(listener.getsockname()[1]), total)
        grown = peak_rss_bytes() - before
    assert count >= total
    assert grown < RSS_GROWTH_MAX_BYTES


async def test_slow_client_is_not_cut_while_it_reads(rig):
    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 12000000\r\nConnection: close\r\n\r\n" + b"x" * 12_000_000)

    await rig.start(stream_idle_s=1.5, half_closed_idle_s=0.2, linger_s=0.2, linger_total_s=0.5, keepalive_idle_s=0.2)
    upstream = await rig.upstream(script)
    client = await rig.client(limit=1024)
    await client.send(request(upstream, extra="Connection: close\r\n"))
    await client.head()
    count = len(client.buffer)
    while data := await asyncio.wait_for(client.reader.read(100_000), 5):
        count += len(data)
        await asyncio.sleep(0.03)
    assert count == 12_000_000


async def test_many_small_chunks_keep_their_framing(rig):
    body = chunks(*(b"%d" % number for number in range(20_000)))

    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        await peer.rest()

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    assert (await client.ask(request(upstream))).body == body


class Queue(asyncio.Transport):
    """A transport that only knows how much it still has to send."""

    def __init__(self, queued_bytes):
        super().__init__()
        self.queued_bytes = queued_bytes
        self.aborted = False

    def get_write_buffer_size(self):
        return self.queued_bytes

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def is_closing(self):
        return False

    def can_write_eof(self):
        return True

    def write_eof(self):
        pass

    def write(self, data):
        pass

    def abort(self):
        self.aborted = True


@pytest.mark.parametrize(("step_bytes", "aborted"), [(1, False), (0, True)])
async def test_a_client_that_takes_one_byte_an_hour_is_slow_not_idle(rig, step_bytes, aborted):
    await rig.start(linger_s=2, linger_total_s=30, stream_idle_s=4000, client_connections=0)
    transport = Queue(1000)
    connection = ClientConnection(rig.proxy)
    connection.connection_made(transport)  # one client too many: its refusal is queued and the connection is closing
    now = rig.proxy.now
    for _ in range(100):
        now += 3600
        transport.queued_bytes -= step_bytes
        connection.check(now)
    assert transport.aborted is aborted
    connection.connection_lost(None)
