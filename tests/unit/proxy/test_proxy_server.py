"""The server as a whole: listening, sharing a port, counting, closing; and random splits of whole conversations."""

import asyncio
import contextlib
import os
import random
import re
import socket
import ssl
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_rig import SANDBOX, FastTable, Peer, Rig, Sandbox, Upstream, answer, chunks, replies, request

from agentenv.core.errors import HostNotReady
from agentenv.proxy import CloseSignal, ProxyServer, ProxySettings
from agentenv.proxy.limits import DIAL_DELAYS_MS


async def test_busy_port_is_named_with_its_holder(rig):
    await rig.start()
    other = ProxyServer(rig.table, rig.api_path)
    with pytest.raises(HostNotReady) as caught:
        await other.start("127.0.0.1", rig.port)
    assert f"port {rig.port}" in caught.value.message
    assert f"(pid {os.getpid()})" in caught.value.message
    assert caught.value.hint
    await other.close(0)


async def test_foreign_address_is_refused_clearly(rig):
    with pytest.raises(HostNotReady) as caught:
        await ProxyServer(rig.table, rig.api_path).start("192.0.2.1", 0)
    assert "192.0.2.1" in caught.value.message


async def test_servers_share_a_bound_socket(rig):
    await rig.start()
    upstream = await rig.upstream()
    sock = socket.create_server(("127.0.0.1", 0))
    servers = [ProxyServer(rig.table, rig.api_path) for _ in range(2)]
    ports = {await server.start(sock=copy) for server, copy in zip(servers, (sock, sock.dup()), strict=True)}
    assert len(ports) == 1
    rig.port = ports.pop()
    assert (await (await rig.client()).ask(request(upstream))).status == 200
    await servers[0].close(0)
    assert (await (await rig.client()).ask(request(upstream))).status == 200
    assert rig.table.heard == 2
    await servers[1].close(0)


async def test_several_api_sockets_take_turns(rig, tmp_path):
    paths = [tmp_path / f"api{number}.sock" for number in range(2)]
    upstreams = [await Upstream(replies(answer(b"%d" % number))).start(path) for number, path in enumerate(paths)]
    rig.closers += upstreams
    server = ProxyServer(rig.table, paths)
    rig.port = await server.start()
    seen = {(await (await rig.client()).ask(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")).body for _ in range(4)}
    assert seen == {b"0", b"1"}
    await server.close(0)


async def test_stats_tell_what_happened(rig):
    rig.table = FastTable()
    await rig.start()
    upstream = await rig.upstream()
    client = await rig.client()
    for _ in range(3):
        await client.ask(request(upstream))
    await client.ask(request(80, sandbox="igone"))
    stats = rig.proxy.stats()
    assert (stats.active_connections, stats.active_exchanges, stats.idle_upstreams) == (1, 0, 1)
    assert (stats.total_connections, stats.total_requests) == (1, 4)
    assert stats.outcomes == {"completed": 3, "refused_502": 1}


async def test_pool_is_bounded(rig):
    await rig.start(pool_idle_per_upstream=2, pool_idle_total=3)
    upstreams = [await rig.upstream(slow_answer) for _ in range(2)]
    clients = [await rig.client() for _ in range(10)]
    await asyncio.gather(*(client.ask(request(upstreams[number % 2])) for number, client in enumerate(clients)))
    assert rig.proxy.stats().idle_upstreams <= 3


async def slow_answer(peer):
    while True:
        await peer.head()
        await asyncio.sleep(0.1)
        await peer.send(answer())


async def test_clients_that_talk_at_once_are_dialled_for_once(rig):
    """The pool holds as many connections as 32 clients use in turn: dialling anew for each request would cost several requests."""
    upstream = await rig.upstream()
    await rig.start(pool_idle_s=60)
    clients = [await rig.client() for _ in range(32)]
    for _ in range(4):
        answers = await asyncio.gather(*(client.ask(request(upstream)) for client in clients))
        assert [answer.status for answer in answers] == [200] * 32
    assert rig.table.dials <= 32


async def test_close_lets_exchanges_end_and_cuts_the_rest(rig):
    async def endless(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        await peer.rest()

    await rig.start()
    slow, stuck = await rig.upstream(slow_answer), await rig.upstream(endless)
    ending, cut, idle = await rig.client(), await rig.client(), await rig.client()
    await idle.ask(request(slow))
    await ending.send(request(slow))
    await cut.send(request(stuck))
    await cut.until(b"x\r\n")
    closing = asyncio.create_task(rig.proxy.close(0.6))
    head = await ending.head()
    assert (head["connection"], await ending.body(head)) == ("close", b"ok")
    assert await ending.rest() == b""
    assert await idle.rest() == b""
    with contextlib.suppress(ConnectionError):
        assert not (await cut.rest()).endswith(b"0\r\n\r\n")
    await asyncio.wait_for(closing, 2)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", rig.port)


async def test_tls_listener(rig, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    process = await asyncio.create_subprocess_exec(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ProxyServer(rig.table, rig.api_path)
    rig.port = await server.start(ssl_context=context)
    upstream = await rig.upstream()
    client = await rig.client(ssl=ssl.create_default_context(cafile=certificate), server_hostname="localhost")
    body = b"x" * 1_000_000
    response = await client.ask(request(upstream, "POST", body=body))
    assert b"X-Forwarded-Proto: https\r\n" in response.body
    assert response.body.endswith(body)
    refused = await client.ask(request(80, sandbox="igone", extra="Connection: close\r\n"))
    assert refused.status == 502
    assert await client.rest() == b""
    await server.close(1)


def test_close_signal():
    signal, calls = CloseSignal(), []
    first, second = (lambda: calls.append(1)), (lambda: calls.append(2))
    signal.subscribe(first)
    signal.subscribe(second)
    signal.unsubscribe(first)
    assert (len(signal), bool(signal), signal.fired) == (1, True, False)
    signal.fire()
    signal.fire()
    assert calls == [2]
    signal.subscribe(first)
    assert calls == [2, 1]


def test_close_signal_reaches_everyone_even_if_one_fails():
    signal, calls = CloseSignal(), []
    signal.subscribe(lambda: 1 / 0)
    for number in range(3):
        signal.subscribe(lambda number=number: calls.append(number))
    signal.fire()
    assert sorted(calls) == [0, 1, 2]


def test_limits_of_the_contract():
    defaults = ProxySettings()
    assert defaults.stream_idle_s >= 600
    assert defaults.keepalive_idle_s >= 600
    assert len(DIAL_DELAYS_MS) == 4
    assert (min(DIAL_DELAYS_MS), max(DIAL_DELAYS_MS)) == (100, 400)


FIELD = st.tuples(
    st.from_regex(r"X-[A-Za-z0-9]{1,12}", fullmatch=True), st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=40)
)


@st.composite
def conversations(draw):
    """A few pipelined requests as one byte string with what the upstream must see of each, and a way to cut it up."""
    messages = []
    for _ in range(draw(st.integers(1, 4))):
        parts = draw(st.lists(st.binary(min_size=1, max_size=300), max_size=4))
        fields = "".join(f"{name}: {value}\r\n" for name, value in draw(st.lists(FIELD, max_size=5)))
        path = draw(st.from_regex(r"/[a-zA-Z0-9/._~%?=&-]{0,40}", fullmatch=True))
        if draw(st.booleans()):
            messages.append((path, fields + "Transfer-Encoding: chunked\r\n", chunks(*parts, trailers=b"X-T: 1\r\n")))
        else:
            body = b"".join(parts)
            messages.append((path, fields + f"Content-Length: {len(body)}\r\n", body))
    return messages, draw(st.lists(st.integers(1, 400), min_size=1, max_size=30))


async def upstream_bytes(messages, steps, tmp_path):
    """What one upstream receives when the requests arrive cut into `steps`."""
    rig = Rig(tmp_path)
    rig.table = FastTable()
    try:
        await rig.start(domains=())
        upstream = await rig.upstream()
        client = await rig.client()
        data = b"".join(
            f"POST {path} HTTP/1.1\r\nHost: h\r\nE2b-Sandbox-Id: {SANDBOX}\r\nE2b-Sandbox-Port: {upstream.port}\r\n{fields}\r\n".encode()
            + body
            for path, fields, body in messages
        )
        pos, turn = 0, 0
        while pos < len(data):
            step = steps[turn % len(steps)] if turn < 200 else len(data)
            client.writer.write(data[pos : pos + step])
            pos, turn = pos + step, turn + 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for _ in messages:
            head = await client.head()
            assert head.status == 200, await client.body(head)
            await client.body(head)
        assert len(upstream.peers) == 1
        return re.sub(rb"E2b-Sandbox-Port: \d+\r\n", b"", upstream.peers[0].received)
    finally:
        await rig.stop()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversation=conversations())
async def test_random_splits_give_the_same_upstream_bytes(conversation, tmp_path):
    messages, steps = conversation
    whole = await upstream_bytes(messages, [1 << 20], tmp_path)
    split = await upstream_bytes(messages, steps, tmp_path)
    assert split == whole
    position = 0
    for path, _, body in messages:
        start = whole.index(f"POST {path} HTTP/1.1\r\n".encode(), position)
        assert start == position
        position = whole.index(b"\r\n\r\n", start) + 4
        assert whole.startswith(body, position)
        position += len(body)
    assert position == len(whole)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    noise=st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from([b"GET / HTTP/1.1\r\n", b"Host: h\r\n", b"\r\n", b"\r\n\r\n", b"0\r\n\r\n"])),
        max_size=8,
    )
)
async def test_noise_never_breaks_the_server(noise, tmp_path):
    rig = Rig(tmp_path)
    try:
        await rig.start()
        client = await rig.client()
        for piece in noise:
            client.writer.write(piece)
            await asyncio.sleep(0)
        client.writer.write_eof()
        try:
            out = await client.rest()
        except ConnectionError:
            out = b""
        assert out == b"" or re.match(rb"HTTP/1\.1 (400|405|431|503|505) ", out)
        await rig.settle(lambda: rig.proxy.stats().active_connections == 0)
    finally:
        await rig.stop()


async def test_concurrent_clients_never_get_each_others_answers(rig):
    rig.table = FastTable()
    await rig.start()
    upstreams = [await rig.upstream() for _ in range(3)]
    api = await rig.api()

    async def run(number):
        client: Peer = await rig.client()
        for turn in range(40):
            path = f"/{number}/{turn}"
            if (number + turn) % 4 == 3:
                response = await client.ask(f"GET {path} HTTP/1.1\r\nHost: api\r\n\r\n".encode())
            else:
                response = await client.ask(request(upstreams[(number + turn) % 3], "POST", path, body=os.urandom((number * turn) % 3000)))
            assert f" {path} ".encode() in response.body.partition(b"\r\n")[0]

    await asyncio.gather(*(run(number) for number in range(25)))
    assert api.peers
    assert rig.outcomes()["completed"] == 1000


async def test_nothing_leaks_when_anyone_leaves_at_any_time(rig):
    """Clients leave and sandboxes die at random moments, also while dialling and resuming; afterwards no descriptor is left."""
    chance = random.Random(7)

    async def moody(peer):
        await peer.head()
        await asyncio.sleep(chance.random() * 0.02)
        mood = chance.randrange(4)
        if mood == 0:
            return
        await peer.send(answer(b"x" * 50_000) if mood == 1 else b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        if mood == 3:
            peer.reset()
        await peer.rest()

    await rig.start()
    upstream = await rig.upstream(moody)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed_port = unused.getsockname()[1]
    before = len(list(Path("/proc/self/fd").iterdir()))

    async def visit(number):
        sandbox_id = f"i{number % 20}"
        rig.table.sandboxes.setdefault(sandbox_id, Sandbox())
        client = await rig.client()
        port = closed_port if chance.random() < 0.2 else upstream.port
        await client.send(request(port, chance.choice(["GET", "POST"]), sandbox=sandbox_id, body=b"y" * chance.choice([0, 10, 100_000])))
        await asyncio.sleep(chance.random() * 0.04)
        if chance.random() < 0.2 and sandbox_id in rig.table.sandboxes:
            rig.table.kill(sandbox_id)
        client.reset() if chance.random() < 0.5 else client.close()

    for turn in range(6):
        rig.table.resolve_delay_s = 0.01 * (turn % 3)
        await asyncio.gather(*(visit(number) for number in range(80)))
    for sandbox_id in list(rig.table.sandboxes):
        rig.table.kill(sandbox_id)
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)
    await rig.settle(lambda: all(task.done() for task in upstream.tasks), 12)
    await rig.settle(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
    assert rig.proxy.stats().idle_upstreams == 0
