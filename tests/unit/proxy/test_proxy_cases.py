"""Cases A24, B02 and G05 of the field reports, scaled to seconds and megabytes."""

import asyncio
import socket
import ssl
import threading

import pytest
from http2_client import Http2Client, fields
from proxy_rig import SANDBOX, WAIT_S, answer, chunks, dechunk, replies
from test_proxy_flow import MIB, RSS_GROWTH_MAX_BYTES, forget_peak, peak_rss_bytes

from agentenv.core.clock import SystemClock
from agentenv.proxy.authority import LocalAuthority
from agentenv.proxy.tls import TlsIdentity

ROUTINGS = ["headers", "host", "single host with headers"]


def routed(upstream, routing):
    """The lines that name the sandbox."""
    if routing == "host":
        return f"Host: {upstream.port}-{SANDBOX}.sbx.test\r\n"
    host = "sandbox.sbx.test" if routing == "headers" else "127.0.0.1:3000"
    return f"Host: {host}\r\nE2b-Sandbox-Id: {SANDBOX}\r\nE2b-Sandbox-Port: {upstream.port}\r\n"


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("expect", [False, True])
async def test_uploads_and_downloads_by_every_route(rig, routing, framing, expect):
    """Case B02."""
    body = bytes(range(256)) * 2000

    async def script(peer):
        while True:
            head = await peer.head()
            if "expect" in head:
                await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            raw = await peer.body(head)
            got = dechunk(raw) if "transfer-encoding" in head else raw
            if head.line.startswith("GET"):
                await peer.send(answer(body))
            else:
                await peer.send(answer(b"%s %d %r" % (head.line.encode(), len(got), got == body)))

    upstream = await rig.upstream(script)
    await rig.start()
    client = await rig.client()
    length = f"Content-Length: {len(body)}\r\n" if framing == "length" else "Transfer-Encoding: chunked\r\n"
    more = "Expect: 100-continue\r\n" if expect else ""
    for _ in range(2):  # the second on kept connections
        head = f"POST /files?path=/a%20b HTTP/1.1\r\n{routed(upstream, routing)}{length}{more}\r\n"
        await client.send(head.encode())
        if expect:
            assert (await client.head()).status == 100
        await client.send(body if framing == "length" else chunks(body[:1000], body[1000:]))
        done = await client.head()
        assert await client.body(done) == b"POST /files?path=/a%%20b HTTP/1.1 %d True" % len(body)
        down = await client.ask(f"GET /files HTTP/1.1\r\n{routed(upstream, routing)}\r\n".encode())
        assert down.body == body


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_that_has_begun_is_never_sent_again(rig, framing):
    """Case B02: the kept connection dies after the first body bytes; whether the server acted on them nobody knows."""

    async def script(peer):
        await peer.head()
        await peer.send(answer())
        await peer.head()
        if not peer.buffer:
            await peer.more()
        peer.reset()

    upstream = await rig.upstream(script)
    await rig.start(pool_idle_s=60)
    client = await rig.client()
    assert (await client.ask(f"GET / HTTP/1.1\r\n{routed(upstream, 'headers')}\r\n".encode())).status == 200
    length = "Content-Length: 100000\r\n" if framing == "length" else "Transfer-Encoding: chunked\r\n"
    first = b"x" * 500 if framing == "length" else b"1f4\r\n" + b"x" * 500 + b"\r\n"
    await client.send(f"PUT / HTTP/1.1\r\n{routed(upstream, 'headers')}{length}\r\n".encode() + first)
    assert (await client.head()).status == 502
    assert len(upstream.peers) == 1


@pytest.mark.parametrize("protocol", ["http/1.1", "http/2", "tunnel"])
async def test_quiet_streams_outlive_every_other_limit(rig, protocol):
    """Case A24: only `stream_idle_s` may end a stream in which nothing moves, and that is an hour."""
    quiet_s = 1.5
    done = asyncio.Event()

    async def script(peer):
        head = await peer.head()
        if "upgrade" in head:
            await peer.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            await done.wait()
            await peer.send(b"late")
        else:
            await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
            await done.wait()
            await peer.send(b"4\r\nlate\r\n0\r\n\r\n")

    short = {"head_timeout_s": 0.2, "keepalive_idle_s": 0.2, "half_closed_idle_s": 0.2, "linger_s": 0.2, "pool_idle_s": 0.2}
    await rig.start(**short, dial_timeout_s=0.5, resolve_timeout_s=0.5, handshake_timeout_s=0.5)
    assert rig.proxy.settings.stream_idle_s >= 600
    upstream = await rig.upstream(script)
    if protocol == "http/2":
        client = Http2Client(*await asyncio.open_connection("127.0.0.1", rig.port))
        rig.closers.append(client)
        stream_id = client.begin(fields(upstream), end=True)
        await asyncio.sleep(quiet_s)
        done.set()
        assert (await client.answer(stream_id)).body == b"alate"
        return
    client = await rig.client()
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n" if protocol == "tunnel" else ""
    await client.send(f"GET / HTTP/1.1\r\n{routed(upstream, 'headers')}{upgrade}\r\n".encode())
    await client.head()
    await asyncio.sleep(quiet_s)
    done.set()
    await client.until(b"late")


@pytest.mark.parametrize("first", [b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"Content-Length: 9\r\n\r\nabc", b"\r\nabc"])
@pytest.mark.parametrize("tls", [False, True])
async def test_kill_is_an_error_in_every_framing(rig, tmp_path, first, tls):
    """Case A10: over TLS, too, a client must not be able to take the end of the connection for the end of the response."""

    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\n" + first)
        await peer.rest()

    upstream = await rig.upstream(script)
    await rig.start()
    options = {}
    if tls:
        authority = LocalAuthority(tmp_path / "ca", "sbx.test", SystemClock())
        authority.ensure()
        rig.port = await rig.proxy.start(ssl_context=TlsIdentity(authority.cert_file, authority.key_file).context)
        options = {"ssl": ssl.create_default_context(cafile=authority.ca_file), "server_hostname": "api.sbx.test"}
    client = await rig.client(**options)
    await client.send(f"GET / HTTP/1.1\r\n{routed(upstream, 'headers')}\r\n".encode())
    await client.until(b"abc")
    rig.table.kill()
    with pytest.raises(OSError):  # a reset, or an error of TLS
        await client.rest()


def take_blocks(listener, total):
    """A blocking server that counts one body's bytes."""
    sock, _ = listener.accept()
    with sock:
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(65536)
        count, buffer = len(head.partition(b"\r\n\r\n")[2]), bytearray(MIB)
        while count < total:
            count += sock.recv_into(buffer)
        sock.sendall(answer(b"%d" % count))
        sock.recv(1)


def push(port, head, total):
    """A blocking client: sends a big body, returns the answer."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(WAIT_S * 6)
        sock.sendall(head)
        block = bytes(MIB)
        for _ in range(total // MIB):
            sock.sendall(block)
        return sock.recv(65536)


async def test_big_upload_in_flat_memory(rig):
    """Case G05; its way back is in `test_proxy_flow`."""
    total = 512 * MIB
    await rig.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=take_blocks, args=(listener, total), daemon=True).start()
        port = listener.getsockname()[1]
        head = f"POST / HTTP/1.1\r\nHost: {port}-{SANDBOX}.sbx.test\r\nContent-Length: {total}\r\n\r\n".encode()
        forget_peak()
        before = peak_rss_bytes()
        reply = await asyncio.to_thread(push, rig.port, head, total)
        grown = peak_rss_bytes() - before
    assert reply.endswith(b"%d" % total)
    assert grown < RSS_GROWTH_MAX_BYTES


async def test_tokens_are_in_no_log(rig, caplog):
    """Case G11."""
    caplog.set_level("DEBUG")
    upstream = await rig.upstream(replies(answer()))
    await rig.start()
    rig.table.sandboxes[SANDBOX].token = "right-secret"
    client = await rig.client()
    for token in ("wrong-secret", "right-secret"):
        await client.ask(f"GET / HTTP/1.1\r\n{routed(upstream, 'headers')}E2b-Traffic-Access-Token: {token}\r\n\r\n".encode())
    rig.table.error = RuntimeError("broken table")
    await client.ask(f"GET / HTTP/1.1\r\n{routed(upstream, 'headers')}E2b-Traffic-Access-Token: right-secret\r\n\r\n".encode())
    assert "broken table" in caplog.text
    assert "secret" not in caplog.text
