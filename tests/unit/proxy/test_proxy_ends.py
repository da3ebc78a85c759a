"""How things end: deaths on either side, refusals, retries, deadlines."""

import asyncio
import json
import socket
import time

import pytest
from proxy_rig import SANDBOX, FastTable, Sandbox, answer, chunks, replies, request

from agentenv.core.errors import Conflict, NotFound
from agentenv.proxy import ProxyRefusal

STREAM_STARTS = [
    pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"3\r\nabc\r\n", id="chunked"),
    pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", b"5\r\nabc", id="inside a chunk"),
    pytest.param(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n", b"3\r\nabc\r\n0\r\n", id="before the last line"
    ),
    pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", b"abc", id="length"),
    pytest.param(b"HTTP/1.1 200 OK\r\n\r\nabc", b"abc", id="until close"),
]


def stream(start, after):
    async def script(peer):
        await peer.head()
        await peer.send(start)
        await after(peer)

    return script


async def forever(peer):
    await peer.rest()


async def cut(client):
    """Read to the end; returns True if it was a reset, which no client takes for a tidy end or for a fault in the framing."""
    try:
        await client.rest()
    except ConnectionError:
        return True
    return False


# A response that ends by closing has no other sign of its end: for that one only a reset is a death.
@pytest.mark.parametrize(
    ("start", "seen", "how"),
    [
        pytest.param(*case.values, how, id=f"{case.id}-{how}")
        for case in STREAM_STARTS
        for how in ("close", "reset")
        if (case.id, how) != ("until close", "close")
    ],
)
async def test_upstream_death_in_mid_response_is_seen_as_such(rig, start, seen, how):
    async def after(peer):
        await asyncio.sleep(0.1)
        peer.close() if how == "close" else peer.reset()

    await rig.start()
    upstream = await rig.upstream(stream(start, after))
    client = await rig.client()
    await client.send(request(upstream))
    await client.head()
    assert await cut(client)
    assert rig.outcomes()["upstream_lost"] == 1
    assert rig.table.heard == 0, "an answer that broke off says nothing good of who gave it"


@pytest.mark.parametrize(("start", "seen"), STREAM_STARTS)
async def test_kill_cuts_streams_at_once_and_untidily(rig, start, seen):
    await rig.start()
    upstream = await rig.upstream(stream(start, forever))
    client, other = await rig.client(), await rig.client()
    await client.send(request(upstream))
    await client.head()
    await client.until(seen)
    await other.send(request(upstream, extra="Connection: close\r\n"))
    await other.until(seen)
    began = time.monotonic()
    rig.table.kill()
    assert await cut(client)
    assert await cut(other)
    assert time.monotonic() - began < 0.2
    client = await rig.client()
    response = await client.ask(request(49983, path="/health"))
    assert response.status == 502
    assert response["should-retry"] == "false"
    assert response.body == b'{"sandboxId":"%s","message":"The sandbox was not found","code":502}' % SANDBOX.encode()
    await rig.settle(lambda: all(peer.reader.at_eof() or peer.reader.exception() for peer in upstream.peers))


async def test_kill_before_the_answer_and_while_dialling(rig):
    await rig.start()
    upstream = await rig.upstream(stream(b"", forever))
    waiting, dialling = await rig.client(), await rig.client()
    await waiting.send(request(upstream))
    await rig.settle(lambda: upstream.peers)
    await dialling.send(request(free_port()))
    await rig.settle(lambda: rig.table.dials >= 2)
    rig.table.kill()
    for client in (waiting, dialling):
        head = await client.head()
        assert head.status == 502
        assert b"was not found" in await client.body(head)
    await asyncio.sleep(0.3)
    assert rig.table.dials <= 3


async def test_kept_connections_die_with_their_run(rig):
    await rig.start()
    upstream = await rig.upstream()
    client = await rig.client()
    await client.ask(request(upstream))
    assert rig.proxy.stats().idle_upstreams == 1
    signal = rig.table.sandboxes[SANDBOX].closed
    rig.table.sandboxes[SANDBOX] = Sandbox()
    signal.fire()
    assert rig.proxy.stats().idle_upstreams == 0
    await client.ask(request(upstream))
    assert len(upstream.peers) == 2


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_client_that_leaves_takes_its_upstream_along(rig, reply, how):
    await rig.start()
    upstream = await rig.upstream(stream(reply, forever))
    client = await rig.client()
    await client.send(request(upstream, "POST", body=b"x" * 10))
    await rig.settle(lambda: upstream.peers)
    if reply:
        await client.until(b"abc")
    began = time.monotonic()
    client.close() if how == "close" else client.reset()
    await rig.settle(lambda: upstream.peers[0].reader.at_eof() or upstream.peers[0].reader.exception())
    assert time.monotonic() - began < 0.5
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)
    assert rig.outcomes()["client_gone"] == 1


async def test_client_that_leaves_in_the_middle_of_its_body(rig):
    await rig.start()
    upstream = await rig.upstream(stream(b"", forever))
    client = await rig.client()
    await client.send(request(upstream, "POST", extra="Content-Length: 100\r\nConnection: close\r\n") + b"x" * 10)
    await rig.settle(lambda: upstream.peers and upstream.peers[0].received.endswith(b"x" * 10))
    client.writer.write_eof()
    await rig.settle(lambda: upstream.peers[0].reader.at_eof() or upstream.peers[0].reader.exception())


async def test_body_cut_short_during_a_resume_reaches_nobody_as_whole(rig):
    await rig.start()
    upstream = await rig.upstream(stream(b"", forever))
    rig.table.resolve_delay_s = 0.2
    client = await rig.client()
    await client.send(request(upstream, "POST", extra="Content-Length: 100\r\nConnection: close\r\n") + b"x" * 10)
    client.writer.write_eof()
    await rig.settle(lambda: rig.table.resumed)
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0, 1)
    assert rig.outcomes() == {"client_gone": 1}


async def test_client_that_leaves_while_nobody_reads_from_it(rig):
    async def script(peer):
        await peer.head()
        await asyncio.sleep(30)

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    client.writer.write(request(upstream, "POST", extra="Content-Length: 900000000\r\n") + b"x" * 30_000_000)
    await asyncio.sleep(0.3)
    client.reset()
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)
    assert rig.outcomes()["client_gone"] == 1


async def test_client_that_leaves_during_a_resume_cancels_it(rig):
    await rig.start()
    rig.table.resolve_delay_s = 5.0
    client = await rig.client()
    await client.send(request(8000))
    await rig.settle(lambda: rig.table.resolved)
    client.close()
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)
    assert rig.table.resumed == 0


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def test_closed_port_is_dialled_five_times(rig):
    await rig.start()
    client = await rig.client()
    port = free_port()
    began = time.monotonic()
    response = await client.ask(request(port))
    assert 0.9 < time.monotonic() - began < 2.0
    assert rig.table.dials == 5
    expected = {"sandboxId": SANDBOX, "message": "The sandbox is running but port is not open", "port": port, "code": 502}
    assert json.loads(response.body) == expected
    assert (response.status, response["content-type"], response["should-retry"]) == (502, "application/json", "false")
    assert "connection" not in response  # the connection goes on
    await client.ask(request(await rig.upstream()))


@pytest.mark.parametrize("waits_s", [0.3, 1.2])
async def test_silent_port_is_waited_for_and_told_apart_from_a_closed_one(rig, waits_s):
    """A guest that gets no CPU takes no connections, as a listener whose queue is full; one dial waits for it."""
    await rig.start(dial_timeout_s=waits_s)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        port = full.getsockname()[1]
        client = await rig.client()
        began = time.monotonic()
        response = await client.ask(request(port))
        assert waits_s <= time.monotonic() - began < waits_s + 2.0
        assert rig.table.dials == 1
        found = json.loads(response.body)
        assert found["message"].startswith(f"The sandbox is running but port is not open: no answer within {waits_s:g} s")
        assert (response.status, found["port"], response["should-retry"]) == (502, port, "false")


async def test_port_that_opens_late_is_found(rig):
    await rig.start()
    client = await rig.client()
    port = free_port()
    await client.send(request(port))
    await rig.settle(lambda: rig.table.dials >= 2)

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"late"))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    head = await client.head()
    assert await client.body(head) == b"late"
    server.close()


async def test_server_that_speaks_first_is_no_http_server(rig):
    async def script(peer):
        await peer.send(b"SSH-2.0-OpenSSH_9.2\r\n")
        await peer.rest()

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    assert (await client.ask(request(upstream))).status == 502


@pytest.mark.parametrize(("extra", "kept"), [("", True), ("Content-Length: 5\r\n", False), ("Transfer-Encoding: chunked\r\n", False)])
async def test_refusal_keeps_the_connection_only_if_the_body_is_here(rig, extra, kept):
    await rig.start()
    client = await rig.client()
    response = await client.ask(request(80, "POST", sandbox="igone", extra=extra))
    assert response.status == 502
    assert ("connection" not in response) is kept
    if kept:
        assert (await client.ask(request(80, sandbox="igone"))).status == 502
    else:
        await client.send(b"hello")
        assert await client.rest() == b""


async def test_refusal_skips_a_body_that_came_with_the_head(rig):
    await rig.start()
    upstream = await rig.upstream()
    client = await rig.client()
    await client.send(request(80, "POST", sandbox="igone", extra="Transfer-Encoding: chunked\r\n") + chunks(b"GET / HTTP/1.1\r\n\r\n"))
    head = await client.head()
    assert b"was not found" in await client.body(head)
    assert (await client.ask(request(upstream))).status == 200


async def test_browser_gets_a_page(rig):
    await rig.start()
    client = await rig.client()
    response = await client.ask(request(80, sandbox="igone", extra="User-Agent: Mozilla/5.0\r\nAccept: text/html\r\n"))
    assert response["content-type"].startswith("text/html")
    assert b"The sandbox was not found" in response.body


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (NotFound("no such sandbox"), 502, False),
        (Conflict("still pausing"), 409, False),
        (ProxyRefusal(429, {"message": "slow down", "code": 429}, retryable=True), 429, True),
        (RuntimeError("a bug"), 500, False),
    ],
)
@pytest.mark.parametrize("table_class", ["plain", "fast"])
async def test_errors_of_the_table_become_answers(rig, error, status, retry, table_class):
    if table_class == "fast":
        rig.table = FastTable()
        rig.table.sandboxes.clear()
    rig.table.error = error
    await rig.start()
    client = await rig.client()
    response = await client.ask(request(80))
    assert response.status == json.loads(response.body)["code"] == status
    assert ("should-retry" not in response) is retry


@pytest.mark.parametrize("table_class", ["plain", "fast"])
async def test_traffic_token_is_asked_for_on_cold_and_warm_paths(rig, table_class):
    if table_class == "fast":
        rig.table = FastTable()
    await rig.start()
    upstream = await rig.upstream()
    rig.table.sandboxes[SANDBOX].token = "secret"
    client = await rig.client()
    good = await client.ask(request(upstream, extra="E2B-Traffic-Access-Token: secret\r\n"))
    assert good.status == 200
    assert b"secret" not in good.body
    missing = await client.ask(request(upstream))
    assert missing.status == 403
    assert json.loads(missing.body)["message"].endswith("Token header 'e2b-traffic-access-token' is missing")
    wrong = await client.ask(request(upstream, extra="e2b-traffic-access-token: secreT\r\n"))
    assert wrong.status == 403
    assert json.loads(wrong.body)["message"] == "Provided token in header 'e2b-traffic-access-token' is invalid"
    assert upstream.peers[0].received.count(b"GET ") == 1


async def test_unauthorised_request_resumes_nothing(rig):
    await rig.start()
    rig.table.sandboxes[SANDBOX].token = "secret"
    rig.table.resolve_delay_s = 0.01
    client = await rig.client()
    assert (await client.ask(request(8000))).status == 403
    assert rig.table.resumed == 0


async def test_slow_resolve_holds_the_body_back_and_has_a_deadline(rig):
    await rig.start(resolve_timeout_s=0.5)
    upstream = await rig.upstream()
    client = await rig.client()
    rig.table.resolve_delay_s = 0.2
    sending = asyncio.create_task(client.send(request(upstream, "POST", body=b"x" * 5_000_000)))
    await asyncio.sleep(0.1)
    assert not sending.done()  # more than the kernel and our limit hold
    head = await client.head()
    assert (await client.body(head)).endswith(b"x" * 5_000_000)
    await sending
    rig.table.resolve_delay_s = 5.0
    assert (await client.ask(request(upstream))).status == 504


async def test_kept_connection_that_closed_is_not_used(rig):
    await rig.start()
    upstream = await rig.upstream(replies(answer(b"one")))
    client = await rig.client()
    assert (await client.ask(request(upstream, "POST", body=b"a"))).body == b"one"
    await rig.settle(lambda: rig.proxy.stats().idle_upstreams == 0)
    assert (await client.ask(request(upstream, "POST", body=b"a"))).body == b"one"


@pytest.mark.parametrize(
    ("method", "extra", "body", "retried"),
    [
        ("GET", "", b"", True),
        ("DELETE", "", b"", True),
        ("POST", "", b"", False),
        ("POST", "", b"x", False),
        ("PUT", "", b"x", False),
        ("POST", "Content-Length: 3\r\n", b"", True),
    ],
)
async def test_retry_on_a_kept_connection_only_if_safe(rig, method, extra, body, retried):
    async def dies_on_second(peer):
        await peer.head()
        await peer.send(answer(b"one"))
        await peer.head()

    await rig.start()
    upstream = await rig.upstream(dies_on_second)
    client = await rig.client()
    assert (await client.ask(request(upstream))).body == b"one"
    await client.send(request(upstream, method, extra=extra, body=body))
    if extra:
        await rig.settle(lambda: len(upstream.peers) == 2)
        await client.send(b"abc")
    head = await client.head()
    assert head.status == (200 if retried else 502)
    assert rig.outcomes().get("retried", 0) == retried
    if not retried:
        assert head["should-retry"] == "false"
        assert b"closed the connection before it answered" in await client.body(head)


async def test_fresh_connection_that_dies_is_not_retried(rig):
    async def script(peer):
        await peer.head()

    await rig.start()
    upstream = await rig.upstream(script)
    client = await rig.client()
    assert (await client.ask(request(upstream))).status == 502
    assert len(upstream.peers) == 1


async def test_slow_loris_is_cut(rig):
    await rig.start(head_timeout_s=0.3)
    client = await rig.client()
    await client.send(b"GET / HT")
    began = time.monotonic()
    sender = asyncio.create_task(drip(client))
    head = await client.head()
    assert head.status == 408
    assert 0.2 < time.monotonic() - began < 1.5
    sender.cancel()


async def drip(client):
    while True:
        await asyncio.sleep(0.05)
        await client.send(b"x")


async def test_idle_deadlines(rig):
    await rig.start(keepalive_idle_s=0.3, stream_idle_s=0.6, pool_idle_s=0.2)
    upstream = await rig.upstream()
    silent = await rig.upstream(stream(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", forever))
    idle, stuck = await rig.client(), await rig.client()
    await idle.ask(request(upstream))
    await stuck.send(request(silent))
    await stuck.head()
    assert await idle.rest() == b""
    assert await cut(stuck)
    assert rig.outcomes()["idle"] == 1
    await rig.settle(lambda: rig.proxy.stats().idle_upstreams == 0)


async def test_half_closed_client_is_not_waited_for_forever(rig):
    await rig.start(half_closed_idle_s=0.3)
    upstream = await rig.upstream(stream(b"", forever))
    client = await rig.client()
    await client.send(request(upstream, extra="Connection: close\r\n"))
    client.writer.write_eof()
    await rig.settle(lambda: upstream.peers)
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)
    assert rig.outcomes()["idle"] == 1


async def test_lingering_has_an_end(rig):
    await rig.start(linger_s=0.2, linger_total_s=0.6)
    client = await rig.client()
    await client.send(b"nonsense\r\n\r\n")
    assert (await client.head()).status == 400
    sender = asyncio.create_task(drip(client))
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)
    sender.cancel()


async def test_api_down_is_a_503_that_may_be_retried(rig):
    await rig.start()
    client = await rig.client()
    for _ in range(2):
        response = await client.ask(b"GET /sandboxes HTTP/1.1\r\nHost: x\r\n\r\n")
        assert response.body == b'{"code":503,"message":"The API is starting or down"}'
        assert (response.status, response["retry-after"]) == (503, "1")
        assert "should-retry" not in response
        if rig.api_path.exists():
            break
        sock = socket.socket(socket.AF_UNIX)  # a stale socket file of a dead server
        sock.bind(str(rig.api_path))
        sock.close()
    rig.api_path.unlink()
    await rig.api()
    assert (await client.ask(b"GET /sandboxes HTTP/1.1\r\nHost: x\r\n\r\n")).status == 200


async def test_too_many_connections_to_one_sandbox(rig):
    await rig.start(connections_per_sandbox=3)
    upstream = await rig.upstream(stream(b"", forever))
    for _ in range(3):
        await (await rig.client()).send(request(upstream))
    await rig.settle(lambda: len(upstream.peers) == 3)
    response = await (await rig.client()).ask(request(upstream))
    assert response.status == 429
    assert json.loads(response.body)["connectionLimit"] == 3


async def test_too_many_clients(rig):
    await rig.start(client_connections=2)
    upstream = await rig.upstream()
    clients = [await rig.client() for _ in range(2)]
    for client in clients:
        await client.ask(request(upstream))
    extra = await rig.client()
    assert (await extra.head()).status == 503
    clients[0].close()
    await rig.settle(lambda: rig.proxy.stats().active_connections <= 2)
    extra.close()
    await rig.settle(lambda: rig.proxy.stats().active_connections == 1)
    assert (await (await rig.client()).ask(request(upstream))).status == 200
