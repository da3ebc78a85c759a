"""Upgrades: WebSocket with a real client and server, raw tunnels, and what must not be tunnelled."""

import asyncio

import pytest
from proxy_rig import SANDBOX, chunks, replies, request

UPGRADE = "Connection: keep-alive, Upgrade\r\nUpgrade: raw\r\n"
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\nX-Kept: 1\r\n\r\n"


async def reverse(peer):
    """Switch, then answer each line reversed; at the end of the input say goodbye."""
    head = await peer.head()
    assert (head["connection"], head["upgrade"]) == ("Upgrade", "raw")
    await peer.send(SWITCH + b"hello\n")
    try:
        while True:
            line = await peer.until(b"\n")
            await peer.send(line[:-1][::-1] + b"\n")
    except EOFError:
        await peer.send(b"goodbye\n")


async def test_raw_tunnel_with_early_bytes_and_half_close(rig):
    await rig.start()
    upstream = await rig.upstream(reverse)
    client = await rig.client()
    await client.send(request(upstream, extra=UPGRADE) + b"early\n")
    head = await client.head()
    assert (head.status, head["upgrade"], head["connection"], head["x-kept"]) == (101, "raw", "Upgrade", "1")
    assert await client.until(b"ylrae\n") == b"hello\nylrae\n"
    await client.send(b"GET / HTTP/1.1\r\n\r\n")
    assert await client.until(b"\n\r\n") == b"\r1.1/PTTH / TEG\n\r\n"
    client.writer.write_eof()
    assert await client.rest() == b"goodbye\n"
    client.close()
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)


async def test_upstream_half_close_lets_the_client_go_on(rig):
    got = asyncio.get_running_loop().create_future()

    async def script(peer):
        await peer.head()
        await peer.send(SWITCH + b"done")
        peer.writer.write_eof()
        got.set_result(await peer.rest())

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream, extra=UPGRADE))
    await client.head()
    assert await client.rest() == b"done"
    await client.send(b"still talking")
    client.writer.write_eof()
    assert await asyncio.wait_for(got, 5) == b"still talking"
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)


@pytest.mark.parametrize("who", ["upstream", "kill"])
async def test_tunnel_breaks_with_an_error(rig, who):
    await rig.start()
    upstream = await rig.upstream(reverse)
    client = await rig.client()
    await client.send(request(upstream, extra=UPGRADE))
    await client.until(b"hello\n")
    if who == "kill":
        rig.table.kill()
    else:
        upstream.peers[0].reset()
    with pytest.raises(ConnectionError):
        await client.rest()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_client_end_reaches_the_upstream(rig, how):
    async def script(peer):
        await peer.head()
        await peer.send(SWITCH)
        await peer.rest()

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream, extra=UPGRADE))
    await client.head()
    client.close() if how == "close" else client.reset()
    await rig.settle(lambda: upstream.peers[0].reader.at_eof() or upstream.peers[0].reader.exception())
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)


async def test_refused_upgrade_is_an_ordinary_exchange(rig):
    await rig.start()
    upstream = await rig.upstream()
    client = await rig.client()
    await client.send(request(upstream, extra=UPGRADE) + request(upstream, path="/next"))
    first = await client.head()
    assert b"Upgrade: raw" in await client.body(first)
    second = await client.head()
    assert (await client.body(second)).startswith(b"GET /next")


@pytest.mark.parametrize("where", ["envd", "api"])
async def test_no_h2c_past_the_guards(rig, where, monkeypatch):
    await rig.start()
    api = await rig.api()
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    client = await rig.client()
    if where == "api":
        seen = (await client.ask(b"GET / HTTP/1.1\r\nHost: x\r\n" + upgrade.encode() + b"\r\n")).body
        assert api.peers
    else:
        upstream = await rig.upstream()
        monkeypatch.setattr("agentenv.proxy.exchange.ENVD_PORT", upstream.port)
        seen = (await client.ask(request(upstream, extra=upgrade))).body
    assert b"h2c" not in seen
    assert b"Upgrade" not in seen


async def test_web_socket_with_real_ends(rig):
    websockets = pytest.importorskip("websockets")
    seen = {}

    async def handler(connection):
        seen["headers"] = connection.request.headers
        async for message in connection:
            if message == "close":
                await connection.close(4001, "enough")
            else:
                await connection.send(message)

    await rig.start()
    async with websockets.serve(handler, "127.0.0.1", 0, subprotocols=["b"], max_size=None) as server:
        port = server.sockets[0].getsockname()[1]
        headers = {"E2b-Sandbox-Id": SANDBOX, "E2b-Sandbox-Port": str(port), "Cookie": "a=b"}
        url = f"ws://127.0.0.1:{rig.port}/socket?x=1"
        async with websockets.connect(url, additional_headers=headers, subprotocols=["a", "b"], max_size=None) as client:
            assert client.subprotocol == "b"
            assert client.protocol.extensions
            for message in ("text", b"\x00" * 1_048_576, "x" * 1_000_000):
                await client.send(message)
                assert await client.recv() == message
            await asyncio.wait_for(await client.ping(), 5)
            await client.send("close")
            with pytest.raises(websockets.ConnectionClosed):
                await client.recv()
            assert (client.close_code, client.close_reason) == (4001, "enough")
    assert seen["headers"]["Cookie"] == "a=b"
    assert seen["headers"]["Host"] == f"127.0.0.1:{rig.port}"
    assert seen["headers"]["X-Forwarded-For"] == "127.0.0.1"


async def test_same_host_policy_for_plain_and_upgrade_requests(rig):
    await rig.start()
    rig.table.sandboxes[SANDBOX].mask_host = "masked:${PORT}"
    upstream = await rig.upstream()
    client = await rig.client()
    for extra in ("", "Connection: Upgrade\r\nUpgrade: websocket\r\n", "Accept: text/event-stream\r\n"):
        body = (await client.ask(request(upstream, extra=extra))).body
        assert b"\r\nHost: masked:%d\r\n" % upstream.port in body
        assert b"\r\nX-Forwarded-Host: app.test\r\n" in body


async def test_upgrade_with_a_body_that_is_still_owed_is_not_switched(rig):
    await rig.start()

    async def script(peer):
        await peer.head()
        await peer.send(SWITCH)
        await peer.rest()

    upstream = await rig.upstream(script)
    client = await rig.client()
    await client.send(request(upstream, "POST", extra=UPGRADE + "Content-Length: 5\r\n"))
    assert (await client.head()).status == 502


async def test_chunked_upgrade_request_then_tunnel(rig):
    await rig.start()
    upstream = await rig.upstream(replies(SWITCH + b"x"))
    client = await rig.client()
    await client.send(request(upstream, "POST", extra=UPGRADE + "Transfer-Encoding: chunked\r\n") + chunks(b"abc"))
    assert (await client.head()).status == 101
    assert await client.rest() == b"x"
