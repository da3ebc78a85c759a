"""HTTP/2 from the client's side: routing, bodies, windows and ends, as over HTTP/1.1."""

import asyncio
import contextlib
import json
import ssl

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from http2_client import Http2Client, fields
from proxy_rig import SANDBOX, WAIT_S, answer, chunks, dechunk, replies, request

from agentenv.core.clock import SystemClock
from agentenv.proxy.authority import LocalAuthority
from agentenv.proxy.http2_library import PREFACE
from agentenv.proxy.limits import HTTP2_RESETS_MAX, HTTP2_STREAMS_MAX, HTTP2_WINDOW_BYTES
from agentenv.proxy.tls import TlsIdentity


@pytest.fixture
async def connect(rig):
    """Makes clients of the rig's proxy."""

    async def make(tls=None, port=None, **options):
        more = {"ssl": tls, "server_hostname": "api.sbx.test"} if tls else {}
        reader, writer = await asyncio.open_connection("127.0.0.1", port or rig.port, **more)
        client = Http2Client(reader, writer, **options)
        rig.closers.append(client)
        return client

    return make


def sent_head(answer):
    """The head that the upstream saw, as the echo told it."""
    return answer.body.partition(b"\r\n\r\n")[0]


async def test_streams_of_one_connection_go_their_own_ways(rig, connect):
    upstream, other = await rig.upstream(), await rig.upstream(replies(answer(b"other")))
    await rig.api(replies(answer(b"api")))
    await rig.start()
    client = await connect()
    ids = [
        client.begin(fields(upstream, path="/a?b=c"), end=True),
        client.begin(fields(), end=True),
        client.begin(fields(authority=f"{other.port}-{SANDBOX}.sbx.test"), end=True),
        client.begin(fields(upstream, sandbox="igone"), end=True),
    ]
    first, api, by_host, gone = [await client.answer(stream_id) for stream_id in ids]
    assert sent_head(first).startswith(b"GET /a?b=c HTTP/1.1\r\nHost: app.test\r\n")
    assert (api.body, by_host.body) == (b"api", b"other")
    assert (gone.status, json.loads(gone.body)["message"]) == (502, "The sandbox was not found")
    assert gone.fields["should-retry"] == "false"


async def test_over_tls_for_clients_that_offer_nothing_else(rig, connect, tmp_path):
    authority = LocalAuthority(tmp_path / "ca", "sbx.test", SystemClock())
    authority.ensure()
    identity = TlsIdentity(authority.cert_file, authority.key_file)
    upstream = await rig.upstream()
    await rig.start()
    port = await rig.proxy.start(ssl_context=identity.context)
    tls = ssl.create_default_context(cafile=authority.ca_file)
    tls.set_alpn_protocols(["h2"])
    client = await connect(tls=tls, port=port)
    body = b"x" * 1_000_000
    echoed = await client.ask(fields(upstream, "POST"), body)
    assert b"X-Forwarded-Proto: https\r\n" in echoed.body
    assert dechunk(echoed.body.partition(b"\r\n\r\n")[2]) == body


@pytest.mark.parametrize("size", [0, 1, 16384, 70_000, 1_500_000])
@pytest.mark.parametrize("with_length", [True, False])
async def test_bodies_both_ways(rig, connect, size, with_length):
    upstream = await rig.upstream()
    await rig.start()
    client = await connect()
    body = bytes(range(256)) * (size // 256) + b"z" * (size % 256)
    extra = [("content-length", str(size))] if with_length else []
    stream_id = client.begin(fields(upstream, "POST", extra=extra))
    await client.send(stream_id, body, end=True)
    found = await client.answer(stream_id)
    head, _, raw = found.body.partition(b"\r\n\r\n")
    assert (b"content-length: %d" % size in head) == with_length
    assert (raw if with_length else dechunk(raw)) == body
    assert found.fields["content-length"] == str(len(found.body))


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS", "PATCH", "PROPFIND"])
async def test_methods(rig, connect, method):
    upstream = await rig.upstream()
    await rig.start()
    client = await connect()
    for _ in range(2):  # the second on a kept connection
        found = await client.ask(fields(upstream, method))
        assert found.status == 200
        assert found.ended
        assert (found.body == b"") == (method == "HEAD")
        assert int(found.fields["content-length"]) > 0
    assert len(upstream.peers) == 1


@pytest.mark.parametrize(
    ("sent", "body", "trailers"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"ab", b"c"), b"abc", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"a", trailers=b"X-Sum: 7\r\n"), b"a", {"x-sum": "7"}),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(trailers=b"X-Sum:0\r\n"), b"", {"x-sum": "0"}),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok", None),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", None),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", None),
    ],
)
async def test_framings_of_responses(rig, connect, sent, body, trailers):
    async def script(peer):
        await peer.head()
        await peer.send(sent)

    upstream = await rig.upstream(script)
    await rig.start()
    found = await (await connect()).ask(fields(upstream))
    assert (found.body, found.trailers, found.ended, found.reset) == (body, trailers, True, None)
    assert not {"transfer-encoding", "connection", "keep-alive"} & set(found.fields)


async def test_trailers_of_requests(rig, connect):
    upstream = await rig.upstream()
    await rig.start()
    found = await (await connect()).ask(fields(upstream, "POST"), b"abc", trailers=[("x-sum", "6")])
    assert found.body.endswith(b"0\r\nx-sum: 6\r\n\r\n")


@pytest.mark.parametrize("name", ["content-length", "transfer-encoding", "host", "e2b-sandbox-id"])
async def test_trailers_that_could_change_the_request_are_refused(rig, connect, name):
    upstream = await rig.upstream()
    await rig.start()
    client = await connect()
    found = await client.ask(fields(upstream, "POST"), b"abc", trailers=[(name, "5")])
    assert found.reset or client.goaway
    for peer in upstream.peers:
        assert name.encode() + b": 5" not in peer.received


async def test_same_host_policy_as_over_http_1(rig, connect):
    """Case G01: what an app sees of the request does not depend on the protocol the client chose."""
    upstream = await rig.upstream()
    await rig.start()
    for mask in (None, "localhost:${PORT}"):
        rig.table.sandboxes[SANDBOX].mask_host = mask
        plain = (await (await rig.client()).ask(request(upstream, extra="X-Forwarded-For: 9.9.9.9\r\n"))).body
        over_2 = (await (await connect()).ask(fields(upstream, extra=[("x-forwarded-for", "9.9.9.9")]))).body
        names = (b"host", b"x-forwarded-host", b"x-forwarded-for", b"x-forwarded-proto")

        def seen(head, names=names):
            lines = [line.partition(b": ") for line in head.split(b"\r\n")]
            return {name.lower(): value for name, _, value in lines if name.lower() in names}

        assert seen(plain) == seen(over_2)
        assert seen(over_2)[b"host"] == (f"localhost:{upstream.port}".encode() if mask else b"app.test")


async def test_cookies_are_one_field_again(rig, connect):
    upstream = await rig.upstream()
    await rig.start()
    found = await (await connect()).ask(fields(upstream, extra=[("cookie", "a=1"), ("cookie", "b=2")]))
    assert b"cookie: a=1; b=2" in sent_head(found)


async def test_interim_answers(rig, connect):
    async def script(peer):
        head = await peer.head()
        assert head["expect"] == "100-continue"
        await peer.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        await peer.chunked()
        await peer.send(answer(b"done"))

    upstream = await rig.upstream(script)
    await rig.start()
    client = await connect()
    stream_id = client.begin(fields(upstream, "POST", extra=[("expect", "100-continue")]))
    await rig.settle(lambda: len(client.answers[stream_id].interim) == 2)
    await client.send(stream_id, b"body", end=True)
    found = await client.answer(stream_id)
    assert [i[":status"] for i in found.interim] == ["103", "100"]
    assert found.body == b"done"


async def test_early_answer_stops_the_upload_without_an_error(rig, connect):
    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")

    upstream = await rig.upstream(script)
    await rig.start()
    client = await connect()
    stream_id = client.begin(fields(upstream, "POST"))
    await client.send(stream_id, b"x" * 1000)
    found = await client.answer(stream_id)
    assert (found.status, found.body, found.ended) == (413, b"big", True)
    await rig.settle(lambda: client.answers[stream_id].reset == ErrorCodes.NO_ERROR)


# Windows


async def test_slow_reader_blocks_its_own_sender_only(rig, connect):
    sent = []

    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await peer.send(b"y" * 65536)
            sent.append(65536)

    endless, quick = await rig.upstream(script), await rig.upstream()
    await rig.start()
    client = await connect(window=20_000)
    client.credit = False
    slow = client.begin(fields(endless), end=True)
    await rig.settle(lambda: len(client.answers[slow].body) == 20_000)
    seen = -1
    while seen != len(sent):  # until the sender stands still
        seen = len(sent)
        await asyncio.sleep(0.3)
    assert sum(sent) < 16 << 20  # what sockets and one stream's buffer hold, on any machine
    for _ in range(5):
        small = client.begin(fields(quick), end=True)
        assert (await client.answer(small)).status == 200
    client.h2.increment_flow_control_window(100_000, slow)
    client.flush()
    await rig.settle(lambda: len(client.answers[slow].body) >= 60_000)


async def test_slow_upstream_blocks_its_own_client_only(rig, connect):
    go_on = asyncio.Event()

    async def script(peer):
        await peer.head()
        await go_on.wait()
        count, tail = peer.buffer.count(b"u"), peer.buffer[-5:]
        while tail != b"0\r\n\r\n":
            data = await asyncio.wait_for(peer.reader.read(1 << 20), WAIT_S)
            count, tail = count + data.count(b"u"), (tail + data)[-5:]
        await peer.send(answer(b"%d" % count))

    stuck, quick = await rig.upstream(script), await rig.upstream()
    await rig.start()
    client = await connect()
    stream_id = client.begin(fields(stuck, "POST"))
    size = 30 << 20
    sending = asyncio.create_task(client.send(stream_id, b"u" * size, end=True))
    before = -1
    while before != client.h2.local_flow_control_window(stream_id):
        before = client.h2.local_flow_control_window(stream_id)
        await asyncio.sleep(0.3)
    assert not sending.done()
    assert (await client.ask(fields(quick, "POST"), b"v" * 100_000)).status == 200
    go_on.set()
    await asyncio.wait_for(sending, 60)
    assert (await client.answer(stream_id)).body == b"%d" % size


async def test_body_that_comes_before_the_route_waits_within_its_window(rig, connect):
    rig.table.resolve_delay_s = 0.5
    upstream = await rig.upstream()
    await rig.start()
    client = await connect()
    stream_id = client.begin(fields(upstream, "POST"))
    size = 3 * HTTP2_WINDOW_BYTES
    sending = asyncio.create_task(client.send(stream_id, b"u" * size, end=True))
    await asyncio.sleep(0.2)
    assert not sending.done()
    assert not upstream.peers
    found = await client.answer(stream_id)
    assert dechunk(found.body.partition(b"\r\n\r\n")[2]) == b"u" * size


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("with_length", [False, True])
async def test_frames_of_one_byte(rig, connect, early, with_length):
    if early:
        rig.table.resolve_delay_s = 0.3
    upstream = await rig.upstream()
    await rig.start()
    client = await connect()
    body = bytes(range(256)) * 40
    stream_id = client.begin(fields(upstream, "POST", extra=[("content-length", str(len(body)))] if with_length else []))
    for pos in range(len(body)):
        client.h2.send_data(stream_id, body[pos : pos + 1], end_stream=pos == len(body) - 1)
    client.flush()  # all frames in one write, far more than one turn's worth
    found = await client.answer(stream_id)
    raw = found.body.partition(b"\r\n\r\n")[2]
    assert (raw if with_length else dechunk(raw)) == body


# Ends


def endless(first):
    async def script(peer):
        await peer.head()
        await peer.send(first)
        await peer.rest()

    return script


@pytest.mark.parametrize(
    "first",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n\r\nabc",
    ],
)
@pytest.mark.parametrize("how", ["kill", "upstream dies", "upstream resets"])
async def test_a_broken_response_ends_in_a_reset(rig, connect, first, how):
    """Cases A10 and 3.5 of the contract: nothing that breaks off may look complete. A tidy end is one only where it ends the body."""
    upstream = await rig.upstream(endless(first))
    quick = await rig.upstream()
    await rig.start()
    client = await connect()
    stream_id = client.begin(fields(upstream), end=True)
    await rig.settle(lambda: client.answers[stream_id].body == b"abc")
    if how == "kill":
        rig.table.kill()
    elif how == "upstream dies" and b"Length" not in first and b"chunked" not in first:
        upstream.peers[0].writer.close()
        assert (await client.answer(stream_id)).ended
        return
    elif how == "upstream dies":
        upstream.peers[0].writer.close()
    else:
        upstream.peers[0].reset()
    found = await client.answer(stream_id)
    assert (found.ended, found.reset) == (False, ErrorCodes.INTERNAL_ERROR)
    assert not client.closed.is_set()  # other streams of the connection are not touched
    assert (await client.ask(fields(quick))).status == (502 if how == "kill" else 200)


async def test_kill_before_the_answer(rig, connect):
    upstream = await rig.upstream(endless(b""))
    await rig.start()
    client = await connect()
    stream_id = client.begin(fields(upstream), end=True)
    await rig.settle(lambda: bool(upstream.peers))
    rig.table.kill()
    found = await client.answer(stream_id)
    assert (found.status, json.loads(found.body)["message"]) == (502, "The sandbox was not found")


@pytest.mark.parametrize("how", ["reset", "disconnect"])
@pytest.mark.parametrize("when", ["answering", "waiting", "uploading", "resolving"])
async def test_client_that_leaves_takes_its_upstream_along(rig, connect, how, when):
    upstream = await rig.upstream(endless(b"HTTP/1.1 200 OK\r\n\r\nabc" if when == "answering" else b""))
    if when == "resolving":
        rig.table.resolve_delay_s = 30
    await rig.start()
    client = await connect()
    stream_id = client.begin(fields(upstream, "POST"), end=when not in ("uploading", "resolving"))
    if when in ("uploading", "resolving"):
        await client.send(stream_id, b"part")
    await rig.settle((lambda: rig.table.resolved) if when == "resolving" else (lambda: bool(upstream.peers)))
    if when == "answering":
        await rig.settle(lambda: client.answers[stream_id].body)
    if how == "reset":
        client.h2.reset_stream(stream_id)
        client.flush()
    else:
        client.close()
    await rig.settle(lambda: rig.proxy.stats().active_exchanges == 0)
    for peer in upstream.peers:
        with contextlib.suppress(ConnectionError):
            await peer.rest()  # it ends: within WAIT_S, or this raises
    assert rig.outcomes()["client_gone"] >= 1


async def test_closed_port(rig, connect):
    await rig.start()
    found = await (await connect()).ask(fields(9))
    assert json.loads(found.body) == {
        "sandboxId": SANDBOX,
        "message": "The sandbox is running but port is not open",
        "port": 9,
        "code": 502,
    }


async def test_tokens_and_internal_paths_are_guarded(rig, connect):
    upstream = await rig.upstream()
    await rig.start()
    rig.table.sandboxes[SANDBOX].token = "secret"
    client = await connect()
    assert (await client.ask(fields(upstream))).status == 403
    assert (await client.ask(fields(upstream, extra=[("e2b-traffic-access-token", "wrong")]))).status == 403
    passed = await client.ask(fields(upstream, extra=[("e2b-traffic-access-token", "secret")]))
    assert passed.status == 200
    assert b"secret" not in passed.body
    assert (await client.ask(fields(upstream))).status == 403  # on a warm route, too
    for path in ("/init", "/%69nit", "//init", "/x/../freeze"):
        assert (await client.ask(fields(49983, "POST", path))).status == 404


async def test_browser_gets_a_page(rig, connect):
    await rig.start()
    person = [("user-agent", "Mozilla/5.0"), ("accept", "text/html"), ("sec-fetch-mode", "navigate")]
    found = await (await connect()).ask(fields(80, sandbox="igone", extra=person))
    assert found.fields["content-type"].startswith("text/html")


# What is refused


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({":method": "CONNECT"}, 405),
        ({":method": "GE T"}, 400),
        ({":scheme": "ftp"}, 400),
        ({":path": "http://evil.test/"}, 400),
        ({":path": "/a b"}, 400),
        ({":path": "/a#b"}, 400),
        ({":path": "*"}, 400),
        ({":authority": "evil.test/x"}, 400),
        ({":authority": "a@b"}, 400),
        ({"host": "other.test"}, 400),
        ({"content-length": "+5"}, 400),
        ({"content-length": "5, 5"}, 400),
        ({"x-y": "a\x01b"}, 400),
        ({"x(y": "v"}, 400),
        ({"e2b-sandbox-port": "80x"}, 400),
        ({"e2b-sandbox-id": "UPPER"}, 400),
        ({":protocol": "websocket"}, 405),
        ({"connection": "close"}, None),
        ({"transfer-encoding": "chunked"}, None),
        ({"upgrade": "h2c"}, None),
        ({"te": "gzip"}, None),
        ({"x-Y": "v"}, None),
        ({"x-y": "a\r\nhost: evil"}, None),
        ({"x-y\r\nhost": "evil"}, None),
        ({":path": ""}, None),
        ({":path": "/\r\nx: y"}, None),
        ({":unknown": "x"}, None),
    ],
)
async def test_requests_of_doubtful_meaning_reach_nobody(rig, connect, change, status):
    upstream = await rig.upstream()
    await rig.api()
    await rig.start()
    client = await connect()
    found = dict(fields(upstream))
    found.update(change)
    ordered = [(k, v) for k, v in found.items() if k.startswith(":")] + [(k, v) for k, v in found.items() if not k.startswith(":")]
    got = await client.ask(ordered)
    if status is not None and not client.goaway:
        assert got.status == status
    else:  # malformed in the eyes of the protocol itself
        assert got.fields is None
        assert client.goaway.error_code == ErrorCodes.PROTOCOL_ERROR or got.reset
    assert not upstream.peers


@pytest.mark.parametrize("name", [":path", ":method", ":authority", "content-length", "host", "e2b-sandbox-id"])
async def test_repeated_fields_reach_nobody(rig, connect, name):
    upstream = await rig.upstream()
    await rig.start()
    client = await connect()
    value = {":path": "/b", ":method": "GET", "content-length": "0", "host": "app.test", "e2b-sandbox-id": SANDBOX}.get(name, "app.test")
    twice = fields(upstream) + ([(name, value)] if name == "e2b-sandbox-id" else [(name, value)] * 2)
    ordered = [f for f in twice if f[0].startswith(":")] + [f for f in twice if not f[0].startswith(":")]
    got = await client.ask(ordered)
    assert client.goaway or got.reset or got.status == 400
    assert not upstream.peers


@pytest.mark.parametrize("length", ["1", "99"])
async def test_a_length_that_lies(rig, connect, length):
    upstream = await rig.upstream()
    await rig.start()
    client = await connect()
    got = await client.ask(fields(upstream, "POST", extra=[("content-length", length)]), b"12345")
    assert client.goaway or got.reset or got.status == 400
    await rig.settle(lambda: rig.proxy.stats().active_exchanges == 0)
    for peer in upstream.peers:
        assert b"12345" not in peer.received or length == "99"


async def test_too_many_fields_and_too_large_ones(rig, connect):
    upstream = await rig.upstream()
    await rig.start()
    client = await connect()
    assert (await client.ask(fields(upstream, extra=[(f"x-{n}", "v") for n in range(300)]))).status == 431
    client.begin(fields(upstream, extra=[(f"x-{n}", "v" * 4000) for n in range(40)]), end=True)
    await asyncio.wait_for(client.closed.wait(), WAIT_S)
    assert not upstream.peers


async def test_too_many_streams(rig, connect):
    upstream = await rig.upstream(endless(b"HTTP/1.1 200 OK\r\n\r\n"))
    await rig.start()
    client = await connect()
    await rig.settle(lambda: client.h2.remote_settings.max_concurrent_streams == HTTP2_STREAMS_MAX)
    client.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 10_000
    client.h2.remote_settings.acknowledge()
    for _ in range(HTTP2_STREAMS_MAX + 1):
        client.begin(fields(upstream), end=True)
    await asyncio.wait_for(client.closed.wait(), WAIT_S)
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)


async def test_rapid_resets_end_the_connection(rig, connect):
    upstream = await rig.upstream(endless(b""))
    await rig.start()
    client = await connect()
    for _ in range(HTTP2_RESETS_MAX + 50):
        if client.closed.is_set():
            break
        with contextlib.suppress(Exception):  # the connection may end while we write
            client.h2.reset_stream(client.begin(fields(upstream), end=True))
            client.flush()
        await asyncio.sleep(0)
    await asyncio.wait_for(client.closed.wait(), WAIT_S)
    assert client.goaway.error_code == ErrorCodes.ENHANCE_YOUR_CALM
    await rig.settle(lambda: rig.proxy.stats().active_exchanges == 0)


async def test_some_resets_do_not(rig, connect):
    upstream = await rig.upstream(endless(b""))
    await rig.start()
    client = await connect()
    for _ in range(HTTP2_RESETS_MAX // 2):
        client.h2.reset_stream(client.begin(fields(upstream), end=True))
        client.flush()
        await asyncio.sleep(0)
    assert (await client.ask(fields(80, sandbox="igone"))).status == 502


async def test_a_peer_that_reads_no_answers_is_cut(rig, connect):
    await rig.start()
    client = await connect()
    client.task.cancel()
    with contextlib.suppress(ConnectionError):
        for _ in range(2000):
            for _ in range(1000):
                client.h2.ping(b"12345678")
            client.flush()
            await asyncio.wait_for(client.writer.drain(), WAIT_S)
            if rig.proxy.stats().active_connections == 0:
                break
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)


# The connection's own life


@pytest.mark.parametrize("step", [1, 3, 23])
async def test_the_preface_may_come_in_pieces(rig, step):
    await rig.start()
    client = await rig.client()
    await client.send_bytewise(PREFACE, step)
    assert (await client.exactly(9))[3] == 4  # a SETTINGS frame


@pytest.mark.parametrize("noise", [b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", b"PRI / HTTP/2.0\r\n\r\n", b"PRI * HTTP/1.1\r\nHost: a\r\n\r\n"])
async def test_what_only_looks_like_the_preface(rig, noise):
    await rig.api()
    await rig.start()
    client = await rig.client()
    await client.send(noise)
    assert (await client.head()).status in (400, 404, 505, 200)


async def test_the_preface_is_none_later_on(rig):
    await rig.api()
    await rig.start()
    client = await rig.client()
    assert (await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")).status == 200
    await client.send(PREFACE)
    assert (await client.head()).status == 505


@pytest.mark.parametrize("noise", [b"\xff" * 100, b"\x00" * 100, b"\x00\x40\x01\x04\x00\x00\x00\x00\x00", b"GET / HTTP/1.1\r\n\r\n"])
async def test_noise_after_the_preface(rig, noise):
    """The third is the head of a frame one byte too long: it is refused before its body comes."""
    await rig.start()
    client = await rig.client()
    await client.send(PREFACE + noise)
    with contextlib.suppress(ConnectionError):
        await client.rest()
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)


async def test_close_lets_streams_end_and_refuses_new_ones(rig, connect):
    go_on = asyncio.Event()

    async def script(peer):
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")
        await go_on.wait()
        await peer.send(b"cd")

    upstream = await rig.upstream(script)
    await rig.start()
    client, idle = await connect(), await connect()
    stream_id = client.begin(fields(upstream), end=True)
    await rig.settle(lambda: client.answers[stream_id].body == b"ab")
    raw = []
    client.h2.receive_data, receive = (lambda data: raw.append(data) or []), client.h2.receive_data
    closing = asyncio.create_task(rig.proxy.close(20))
    await asyncio.wait_for(idle.closed.wait(), WAIT_S)
    assert idle.goaway.error_code == ErrorCodes.NO_ERROR
    await rig.settle(lambda: any(b"\x07\x00" in data for data in raw))
    go_on.set()
    await asyncio.wait_for(closing, WAIT_S)
    assert any(data.endswith(b"cd") or b"cd" in data for data in raw)
    del receive


async def test_idle_deadlines(rig, connect):
    await rig.api(replies(answer()))
    await rig.start(keepalive_idle_s=0.3, head_timeout_s=0.2, stream_idle_s=0.4)
    silent = await connect()
    await asyncio.wait_for(silent.closed.wait(), WAIT_S)
    once = await connect()
    assert (await once.ask(fields())).body == b"ok"
    await asyncio.wait_for(once.closed.wait(), WAIT_S)
    assert once.goaway.error_code == ErrorCodes.NO_ERROR
    hanging = await rig.upstream(endless(b"HTTP/1.1 200 OK\r\n\r\n"))
    busy = await connect()
    found = await busy.answer(busy.begin(fields(hanging), end=True))
    assert found.reset == ErrorCodes.CANCEL


async def test_nothing_leaks_when_clients_leave_at_any_time(rig, connect):
    upstream = await rig.upstream()
    await rig.start()
    for round_number in range(40):
        client = await connect()
        for _ in range(5):
            stream_id = client.begin(fields(upstream, "POST"))
            await client.send(stream_id, b"x" * 1000 * round_number, end=round_number % 2)
        for _ in range(round_number % 7):
            await asyncio.sleep(0)
        client.close()
    await rig.settle(lambda: rig.proxy.stats().active_connections == 0)
    assert rig.proxy.stats().active_exchanges == 0
    await rig.settle(lambda: len(rig.table.sandboxes[SANDBOX].closed) == len(rig.proxy.pool))
