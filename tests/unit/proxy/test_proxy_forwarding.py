"""What passes through: heads, bodies, framing, order."""

import asyncio
import socket

import httpx
import pytest
from proxy_rig import SANDBOX, Sandbox, answer, chunks, dechunk, replies, request


async def test_routing_by_headers_by_host_and_to_the_api_on_one_connection(rig):
    await rig.start()
    sandbox, api = await rig.upstream(), await rig.api()
    client = await rig.client()
    first = await client.ask(request(sandbox, path="/a"))
    assert first.body.startswith(b"GET /a HTTP/1.1\r\nHost: app.test\r\n")
    second = await client.ask(f"GET /b HTTP/1.1\r\nHost: {sandbox.port}-{SANDBOX}.sbx.test:123\r\n\r\n".encode())
    assert second.body.startswith(f"GET /b HTTP/1.1\r\nHost: {sandbox.port}-{SANDBOX}.sbx.test:123\r\n".encode())
    third = await client.ask(b"GET /sandboxes HTTP/1.1\r\nHost: api.sbx.test\r\n\r\n")
    assert third.body.startswith(b"GET /sandboxes HTTP/1.1\r\nHost: api.sbx.test\r\n")
    assert b"X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Proto: http\r\n" in third.body
    assert (len(sandbox.peers), len(api.peers)) == (1, 1)
    assert rig.proxy.stats().total_connections == 1


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"])
async def test_methods(rig, method):
    await rig.start()
    upstream = await rig.upstream()
    client = await rig.client()
    for _ in range(2):
        response = await client.ask(request(upstream, method), head_only=method == "HEAD")
        assert response.status == 200
        assert int(response["content-length"]) > 0
        assert response.body.startswith(f"{method} / ".encode()) or method == "HEAD"
    assert len(upstream.peers) == 1


@pytest.mark.parametrize("size", [1, 1000, 65536, 3_000_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_both_ways(rig, size, chunked):
    await rig.start()
    upstream = await rig.upstream()
    client = await rig.client()
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    if chunked:
        raw = chunks(*(body[pos : pos + 50_001] for pos in range(0, size, 50_001)), trailers=b"X-Sum: 1\r\n")
        message = request(upstream, "POST", extra="Transfer-Encoding: chunked\r\n") + raw
    else:
        raw = body
        message = request(upstream, "POST", body=body)
    sending = asyncio.create_task(client.send(message))
    head = await client.head()
    echoed = await client.body(head)
    await sending
    assert echoed.partition(b"\r\n\r\n")[2] == raw


async def test_chunked_response_with_trailers_and_extensions_passes_unchanged(rig):
    await rig.start()
    raw = chunks(b"one", b"two" * 1000, trailers=b"Grpc-Status: 0\r\n", extension=b";x=1")
    upstream = await rig.upstream(
        replies(b"HTTP/1.1 200 OK\r\nTrailer: Grpc-Status\r\nTransfer-Encoding: chunked\r\n\r\n" + raw, answer(b"next"))
    )
    client = await rig.client()
    response = await client.ask(request(upstream))
    assert response.body == raw
    assert response["trailer"] == "Grpc-Status"
    assert (await client.ask(request(upstream))).body == b"next"
    assert len(upstream.peers) == 1


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_responses_without_body(rig, status):
    await rig.start()
    upstream = await rig.upstream(replies(b"HTTP/1.1 %s\r\nETag: x\r\n\r\n" % status, answer(b"next")))
    client = await rig.client()
    assert (await client.ask(request(upstream), head_only=True))["etag"] == "x"
    assert (await client.ask(request(upstream))).body == b"next"


async def test_head_keeps_the_length_it_would_have(rig):
    await rig.start()
    upstream = await rig.upstream(replies(b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n", answer(b"next")))
    client = await rig.client()
    assert (await client.ask(request(upstream, "HEAD"), head_only=True))["content-length"] == "12345"
    assert (await client.ask(request(upstream))).body == b"next"


async def test_pipelined_requests_are_answered_in_order(rig):
    await rig.start()
    slow, quick, api = await rig.upstream(), await rig.upstream(), await rig.api()
    rig.table.resolve_delay_s = 0.05
    client = await rig.client()
    messages = []
    for number in range(30):
        if number % 3 == 2:
            messages.append(f"POST /{number} HTTP/1.1\r\nHost: api\r\nContent-Length: 3\r\n\r\nabc".encode())
        else:
            messages.append(request(quick if number % 3 else slow, "POST", f"/{number}", body=b"x" * number))
    await client.send(b"".join(messages))
    for number in range(30):
        head = await client.head()
        assert (await client.body(head)).startswith(f"POST /{number} ".encode())
    assert api.peers


async def test_pipelined_local_answers_do_not_pile_up_or_recurse(rig):
    await rig.start()
    client = await rig.client()
    await client.send(request(49983, path="/init") * 3000)
    for _ in range(3000):
        head = await client.head()
        assert head.status == 404
        assert b'"path":"/init"' in await client.body(head)


async def test_pipelining_client_that_reads_nothing_is_held_back(rig):
    await rig.start()
    client = await rig.client(limit=1024)
    message = request(49983, path="/init") * 200
    sending = asyncio.create_task(client.send(message * 2000))
    last, stalled = -1, 0
    while stalled < 10:
        await asyncio.sleep(0.03)
        now = rig.proxy.stats().total_requests
        stalled, last = (stalled + 1, last) if now == last else (0, now)
    assert last < 200 * 2000
    assert not sending.done()
    (connection,) = rig.proxy._connections
    assert connection.transport.get_write_buffer_size() < 1_000_000
    assert len(connection.pending) < 1_000_000
    sending.cancel()


async def test_expect_100_continue_passes_both_ways(rig):
    async def script(peer):
        head = await peer.head()
        assert head["expect"] == "100-continue"
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await peer.exactly(int(head["content-length"]))
        await peer.send(answer(body))

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream, "PUT", extra="Content-Length: 5\r\nExpect: 100-continue\r\n"))
    assert (await client.head()).status == 100
    await client.send(b"hello")
    head = await client.head()
    assert await client.body(head) == b"hello"


async def test_expectation_refused_by_the_upstream(rig):
    await rig.start()

    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n")

    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream, "PUT", extra="Content-Length: 5\r\nExpect: 100-continue\r\n"))
    head = await client.head()
    assert (head.status, head["connection"]) == (417, "close")
    assert await client.rest() == b""


async def test_early_hints_reach_only_modern_clients(rig):
    await rig.start()
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    upstream = await rig.upstream(replies(hints + hints + answer(), hints + answer()))
    client = await rig.client()
    await client.send(request(upstream))
    assert [(await client.head()).status for _ in range(3)] == [103, 103, 200]
    old = await rig.client()
    await old.send(request(upstream, version="1.0"))
    assert (await old.head()).status == 200


async def test_early_response_while_the_body_is_still_coming(rig):
    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await peer.rest()

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream, "POST", extra="Content-Length: 50000000\r\n") + b"x" * 100_000)
    head = await client.head()
    assert (head.status, head["connection"]) == (413, "close")
    assert await client.body(head) == b"big"
    await client.send(b"x" * 100_000)  # a client that has not noticed yet gets no reset
    assert await client.rest() == b""


async def test_client_that_reads_only_after_a_big_upload_still_gets_the_early_answer(rig):
    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await peer.rest()

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream, "POST", extra="Content-Length: 200000000\r\n"))
    for _ in range(200):
        await client.send(b"x" * 1_000_000)
    assert (await client.rest()).endswith(b"big")


async def test_early_answer_survives_the_reset_that_follows_it(rig):
    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await asyncio.sleep(0.05)
        peer.reset()

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    sending = asyncio.create_task(client.send(request(upstream, "POST", extra="Content-Length: 50000000\r\n") + b"x" * 8_000_000))
    head = await client.head()
    assert await client.body(head) == b"big"
    sending.cancel()


async def test_early_answer_is_found_behind_a_failed_write(rig):
    """Body bytes, the answer and the reset are all there before the proxy looks: its next write fails before it has read the answer."""
    await rig.start()
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setblocking(False)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", rig.port))
        await loop.sock_sendall(client, request(listener.getsockname()[1], "POST", extra="Content-Length: 500000\r\n") + b"x")
        server, _ = await loop.sock_accept(listener)
        await asyncio.sleep(0.05)
        client.send(b"x" * 1000)
        server.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        server.close()  # unread data makes this a reset
        received = b""
        while data := await asyncio.wait_for(loop.sock_recv(client, 65536), 5):
            received += data
    assert received.startswith(b"HTTP/1.1 413 ")
    assert received.endswith(b"big")


async def test_full_duplex_bodies(rig):
    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while (line := await peer.until(b"\r\n")) != b"0\r\n":
            data = await peer.exactly(int(line, 16) + 2)
            await peer.send(line + data.upper())
        await peer.send(b"0\r\n\r\n")

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream, "POST", extra="Transfer-Encoding: chunked\r\n"))
    assert (await client.head()).status == 200
    for word in (b"one", b"two", b"three"):
        await client.send(b"%x\r\n%s\r\n" % (len(word), word))
        assert await client.until(word.upper() + b"\r\n")
    await client.send(b"0\r\n\r\n")
    assert await client.rest() == b"0\r\n\r\n"


async def test_http_1_0_client_gets_no_chunks(rig):
    await rig.start()
    raw = chunks(b"hello ", b"world" * 5000, trailers=b"X: y\r\n")
    upstream = await rig.upstream(replies(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + raw, answer(b"kept")))
    client = await rig.client()
    await client.send(request(upstream, version="1.0"))
    head = await client.head()
    assert "transfer-encoding" not in head
    assert head["connection"] == "close"
    assert await client.rest() == dechunk(raw)
    kept = await rig.client()
    response = await kept.ask(request(upstream, version="1.0", extra="Connection: keep-alive\r\n"))
    assert (response["connection"], response.body) == ("keep-alive", b"kept")


async def test_response_that_ends_with_the_connection(rig):
    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.0 200 OK\r\n\r\nsome")
        await asyncio.sleep(0.02)
        await peer.send(b" more")

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream))
    head = await client.head()
    assert head["connection"] == "close"
    assert await client.rest() == b"some more"


async def test_half_closing_client_that_announced_it_gets_its_answer(rig):
    async def script(peer):
        await peer.head()
        await asyncio.sleep(0.1)
        await peer.send(answer(b"late"))

    await rig.start()
    upstream = await rig.upstream(script)
    for extra, version in (("Connection: close\r\n", "1.1"), ("", "1.0")):
        client = await rig.client()
        await client.send(request(upstream, extra=extra, version=version))
        client.writer.write_eof()
        assert (await client.rest()).endswith(b"late")


async def test_host_is_kept_or_masked(rig):
    await rig.start()
    upstream = await rig.upstream()
    rig.table.sandboxes["imasked"] = Sandbox(mask_host="localhost:${PORT}")
    client = await rig.client()
    plain = await client.ask(request(upstream))
    assert b"Host: app.test\r\n" in plain.body
    assert b"X-Forwarded-Host" not in plain.body
    masked = await client.ask(request(upstream, sandbox="imasked"))
    assert b"\r\nHost: localhost:%d\r\n" % upstream.port in masked.body
    assert b"\r\nX-Forwarded-Host: app.test\r\n" in masked.body


async def test_request_bytes_may_come_one_by_one(rig):
    await rig.start()
    upstream = await rig.upstream()
    client = await rig.client()
    message = request(upstream, "POST", extra="Transfer-Encoding: chunked\r\n") + chunks(b"abc", b"defgh", trailers=b"X: y\r\n")
    await client.send_bytewise(message)
    head = await client.head()
    assert (await client.body(head)).endswith(b"\r\n\r\n" + chunks(b"abc", b"defgh", trailers=b"X: y\r\n"))


async def test_response_bytes_may_come_one_by_one(rig):
    message = b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"abc", b"defgh")

    async def script(peer):
        while True:
            await peer.head()
            await peer.send_bytewise(message)

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    for _ in range(2):
        await client.send(request(upstream))
        assert (await client.head()).status == 103
        head = await client.head()
        assert await client.body(head) == chunks(b"abc", b"defgh")


@pytest.mark.parametrize(
    "message",
    [
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a\n\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: y\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX : y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n z\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nE2b-Sandbox-Id: iabc\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nCookie: " + b"x" * 70000 + b"\r\n\r\n",
        b"GET /" + b"x" * 70000,
    ],
)
async def test_refused_heads_end_the_connection(rig, message):
    await rig.start()
    api = await rig.api()
    client = await rig.client()
    await client.send(message + b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n" if message.endswith(b"\n") else message)
    head = await client.head()
    assert head.status in (400, 405, 431, 505)
    assert head["connection"] == "close"
    assert b'"code":%d' % head.status in await client.body(head)
    assert await client.rest() == b""
    assert not api.peers


@pytest.mark.parametrize(
    "body", [b"5 \r\nhello\r\n0\r\n\r\n", b"5\r\nhelloX\r\n0\r\n\r\n", b"5\nhello\n0\n\n", b"0\r\nContent-Length: 4\r\n\r\n"]
)
async def test_bad_chunks_are_refused_and_never_followed(rig, body):
    async def script(peer):
        await peer.rest()

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream, "POST", extra="Transfer-Encoding: chunked\r\n"))
    await rig.settle(lambda: upstream.peers)
    await client.send(body + request(upstream, path="/smuggled"))
    head = await client.head()
    assert (head.status, head["connection"]) == (400, "close")
    await client.rest()
    assert b"smuggled" not in upstream.peers[0].received


@pytest.mark.parametrize(
    "message",
    [
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70000,
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"",
    ],
)
async def test_nonsense_from_the_upstream_is_a_502(rig, message):
    async def script(peer):
        await peer.head()
        await peer.send(message)
        if message.startswith(b"SSH"):
            return
        if message:
            await peer.rest()

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    response = await client.ask(request(upstream))
    assert (response.status, response["should-retry"]) == (502, "false")
    assert b"server in the sandbox" in response.body


async def test_bytes_after_a_response_are_never_used_for_the_next(rig):
    await rig.start()
    upstream = await rig.upstream(replies(answer(b"one") + answer(b"poison"), answer(b"two")))
    client = await rig.client()
    assert (await client.ask(request(upstream))).body == b"one"

    upstream.script = replies(answer(b"two"))
    assert (await client.ask(request(upstream))).body == b"two"
    assert len(upstream.peers) == 2


async def test_unasked_bytes_on_a_kept_connection_close_it(rig):
    async def script(peer):
        await peer.head()
        await peer.send(answer(b"one"))
        await asyncio.sleep(0.05)
        await peer.send(answer(b"poison"))
        await peer.rest()

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    assert (await client.ask(request(upstream))).body == b"one"
    await rig.settle(lambda: rig.proxy.stats().idle_upstreams == 1)
    await rig.settle(lambda: rig.proxy.stats().idle_upstreams == 0, 1)
    upstream.script = replies(answer(b"two"))
    assert (await client.ask(request(upstream))).body == b"two"


async def test_httpx_as_client(rig):
    await rig.start()
    upstream = await rig.upstream()

    async def stream():
        for number in range(50):
            yield b"%d," % number

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{rig.port}") as client:
        headers = {"E2b-Sandbox-Id": SANDBOX, "E2b-Sandbox-Port": str(upstream.port)}
        for _ in range(3):
            response = await client.post("/x", content=stream(), headers=headers)
            assert dechunk(response.content.partition(b"\r\n\r\n")[2]) == b"".join(b"%d," % number for number in range(50))
            response = await client.get(f"http://127.0.0.1:{rig.port}/y?z=%2F", headers=headers)
            assert response.content.startswith(b"GET /y?z=%2F HTTP/1.1\r\n")
