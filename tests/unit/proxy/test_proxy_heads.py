"""Heads, targets and guards without a network."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import errors
from agentenv.proxy import ProxyRefusal, SandboxTarget, pages
from agentenv.proxy.guard import EnvdPathGuard, first_segment
from agentenv.proxy.heads import (
    Forwarding,
    HeadError,
    LastHead,
    client_response_head,
    parse_request,
    parse_response,
    upstream_request_head,
)
from agentenv.proxy.limits import LAST_HEAD_BYTES_MAX
from agentenv.proxy.routes import TargetParser

FORWARDING = Forwarding(b"192.0.2.7", b"http")


def get(fields="", line="GET /a?b=c HTTP/1.1", host="Host: x\r\n"):
    return parse_request(f"{line}\r\n{host}{fields}\r\n".encode("latin-1"))


@pytest.mark.parametrize(
    "fields",
    [
        "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
        "Content-Length: 3\r\nContent-Length: 4\r\n",
        "Content-Length: 3\r\nContent-Length: 3\r\n",
        "Content-Length: 3, 3\r\n",
        "Content-Length: +3\r\n",
        "Content-Length: -3\r\n",
        "Content-Length: 0x3\r\n",
        "Content-Length: 3 3\r\n",
        "Content-Length: 3.0\r\n",
        "Content-Length:\r\n",
        "Content-Length: 99999999999999999999\r\n",
        "Content-Length: \xb2\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        "Transfer-Encoding: \x0bchunked\r\n",
        "Transfer-Encoding\x00: chunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        " Transfer-Encoding: chunked\r\n",
        "A: b\r\n folded\r\n",
        "A: b\r\n\tfolded\r\n",
        "A b: c\r\n",
        "A : c\r\n",
        "A\t: c\r\n",
        ": c\r\n",
        "A\r\n",
        "A: b\x00c\r\n",
        "A: b\x01c\r\n",
        "A: b\x7fc\r\n",
        "A: b\rc\r\n",
        "A: b\nC: d\r\n",
        "A\x80: c\r\n",
        "A(: c\r\n",
        "Host: y\r\n",
        "E2b-Sandbox-Id: ia\r\nE2b-Sandbox-Id: ib\r\n",
    ],
)
def test_doubtful_fields_are_refused(fields):
    with pytest.raises(HeadError) as caught:
        get(fields)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET  / HTTP/1.1", 400),
        ("GET / HTTP/1.1 ", 400),
        ("GET /\tx HTTP/1.1", 400),
        ("GET / HTTP/1.10", 400),
        ("GET / http/1.1", 400),
        ("GET /", 400),
        (" GET / HTTP/1.1", 400),
        ("GET /\x7f HTTP/1.1", 400),
        ("GET x HTTP/1.1", 400),
        ("GET * HTTP/1.1", 400),
        ("GET /a#b HTTP/1.1", 400),
        ("GET ftp://x/ HTTP/1.1", 400),
        ("GET http:///x HTTP/1.1", 400),
        ("GET http://u@x/ HTTP/1.1", 400),
        ("GET / HTTP/2.0", 505),
        ("GET / HTTP/0.9", 505),
        ("GET / HTTP/1.2", 505),
        ("CONNECT x:1 HTTP/1.1", 405),
    ],
)
def test_bad_request_lines(line, status):
    with pytest.raises(HeadError) as caught:
        get(line=line)
    assert caught.value.status == status


@pytest.mark.parametrize("host", ["", "Host:\r\n", "Host: a b\r\n", "Host: a/b\r\n", "Host: u@a\r\n", "Host: a,b\r\n", "Host: a:b\r\n"])
def test_host_must_be_one_good_name(host):
    with pytest.raises(HeadError):
        get(host=host)


def test_http_1_0_rules():
    head = get(line="GET / HTTP/1.0", host="")
    assert not head.keep_alive
    assert get("Connection: keep-alive\r\n", line="GET / HTTP/1.0").keep_alive
    with pytest.raises(HeadError):
        get("Transfer-Encoding: chunked\r\n", line="GET / HTTP/1.0")


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        ("http://h.test/a?b", b"/a?b", b"h.test"),
        ("http://h.test", b"/", b"h.test"),
        ("HTTP://h.test?x", b"/?x", b"h.test"),
        ("https://h.test:8/y//z", b"/y//z", b"h.test:8"),
        ("http://[::1]:8/y", b"/y", b"[::1]:8"),
    ],
)
def test_absolute_form_replaces_host(target, path, host):
    head = get(line=f"GET {target} HTTP/1.1", host="Host: other\r\n")
    assert (head.target, head.host) == (path, host)
    assert b"\r\nHost: " + host + b"\r\n" in upstream_request_head(head, FORWARDING)


def test_too_many_fields():
    get("A: b\r\n" * 150)
    with pytest.raises(HeadError) as caught:
        get("A: b\r\n" * 250)
    assert caught.value.status == 431


def test_hop_by_hop_fields_do_not_pass():
    head = get(
        "Connection: keep-alive, X-Mine, Content-Length, Host, Transfer-Encoding\r\nX-Mine: 1\r\nKeep-Alive: 5\r\nProxy-Connection: x\r\n"
        "Proxy-Authorization: x\r\nTE: gzip, trailers\r\nUpgrade: h2c\r\nContent-Length: 3\r\nx-Kept: 2\r\nSec-WebSocket-Protocol: a, b\r\n"
    )
    out = upstream_request_head(head, FORWARDING)
    assert out == (
        b"GET /a?b=c HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nx-Kept: 2\r\nSec-WebSocket-Protocol: a, b\r\nTE: trailers\r\n"
        b"X-Forwarded-For: 192.0.2.7\r\nX-Forwarded-Proto: http\r\n\r\n"
    )


def test_forwarded_fields_are_believed_only_on_request():
    fields = "X-Forwarded-For: 1.1.1.1\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: evil\r\nForwarded: for=1\r\n"
    out = upstream_request_head(get(fields), FORWARDING)
    assert out.count(b"orwarded") == 2
    assert b"X-Forwarded-For: 192.0.2.7\r\nX-Forwarded-Proto: http\r\n" in out
    out = upstream_request_head(get(fields), Forwarding(b"192.0.2.7", b"http", trust_forwarded=True))
    assert b"X-Forwarded-For: 1.1.1.1, 192.0.2.7\r\nX-Forwarded-Proto: https\r\n" in out
    assert b"X-Forwarded-Host: evil\r\n" in out


def test_masked_host_and_dropped_token():
    out = upstream_request_head(
        get("E2B-Traffic-Access-Token: s\r\n"), Forwarding(b"1", b"http", mask_host=b"localhost:3000", drop_token=True)
    )
    assert (
        out
        == b"GET /a?b=c HTTP/1.1\r\nHost: localhost:3000\r\nX-Forwarded-Host: x\r\nX-Forwarded-For: 1\r\nX-Forwarded-Proto: http\r\n\r\n"
    )


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\x00\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
    ],
)
def test_doubtful_responses_are_refused(head):
    with pytest.raises(HeadError) as caught:
        parse_response(head)
    assert caught.value.status == 502


def test_response_head_is_cleaned():
    head = parse_response(
        b"HTTP/1.1 200 Very fine\r\nConnection: close, x-hop\r\nX-Hop: 1\r\nKeep-Alive: 3\r\n"
        b"Set-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 4\r\n\r\n"
    )
    assert not head.keep_alive
    assert client_response_head(head, b"", chunked=False, with_length=True) == (
        b"HTTP/1.1 200 Very fine\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 4\r\n\r\n"
    )


def test_a_head_that_comes_again_is_known_and_any_other_byte_makes_another():
    heads = LastHead(parse_request)
    first = b"GET /a HTTP/1.1\r\nHost: x\r\nCookie: 1\r\n\r\n"
    assert heads.parse(first) is heads.parse(bytes(bytearray(first)))
    for place in (5, len(first) - 5):
        other = bytearray(first)
        other[place] += 1
        assert heads.parse(bytes(other)) == parse_request(bytes(other)) != heads.parse(first)
    with pytest.raises(HeadError):
        heads.parse(b"GET / HTTP/1.1\r\n\r\n")
    assert heads.parse(first) == parse_request(first)


def test_a_long_head_is_not_kept():
    heads = LastHead(parse_response)
    long = b"HTTP/1.1 200 OK\r\nA: " + b"b" * LAST_HEAD_BYTES_MAX + b"\r\n\r\n"
    assert heads.parse(long) is not heads.parse(long)


@given(st.lists(st.sampled_from([FORWARDING, Forwarding(b"1", b"https"), Forwarding(b"1", b"https", mask_host=b"m", drop_token=True)])))
def test_a_known_head_is_written_for_each_hop_as_a_new_one_would_be(hops):
    known = get("E2b-Traffic-Access-Token: s\r\n")
    for hop in hops:
        assert upstream_request_head(known, hop) == upstream_request_head(get("E2b-Traffic-Access-Token: s\r\n"), hop)


@given(st.lists(st.tuples(st.sampled_from([b"", b"close"]), st.booleans(), st.booleans())))
def test_a_known_answer_is_written_for_each_client_as_a_new_one_would_be(clients):
    data = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
    known = parse_response(data)
    for connection, chunked, with_length in clients:
        new = client_response_head(parse_response(data), connection, chunked=chunked, with_length=with_length)
        assert client_response_head(known, connection, chunked=chunked, with_length=with_length) == new


@pytest.mark.parametrize("host", ["8000-iabc.sbx.test", "8000-iabc.SBX.test:3000", "8000-iabc-client.sbx.test", "8000-iabc.other.test."])
def test_target_by_host(host):
    parser = TargetParser(("sbx.test:3000", "Other.test"))
    assert parser.parse(get(host=f"Host: {host}\r\n")) == SandboxTarget("iabc", 8000)


@pytest.mark.parametrize(
    "host",
    [
        "api.sbx.test",
        "sbx.test",
        "8000-iabc.elsewhere.test",
        "x8000-iabc.sbx.test",
        "8000-iabcsbx.test",
        "a.8000-iabc.sbx.test",
        "[::1]:80",
    ],
)
def test_other_hosts_are_the_api(host):
    assert TargetParser(("sbx.test",)).parse(get(host=f"Host: {host}\r\n")) is None


@pytest.mark.parametrize(
    "fields",
    [
        "E2b-Sandbox-Id: iabc\r\n",
        "E2b-Sandbox-Port: 80\r\n",
        "E2b-Sandbox-Id: iabc\r\nE2b-Sandbox-Port: 0\r\n",
        "E2b-Sandbox-Id: iabc\r\nE2b-Sandbox-Port: 65536\r\n",
        "E2b-Sandbox-Id: iabc\r\nE2b-Sandbox-Port: -1\r\n",
        "E2b-Sandbox-Id: iabc\r\nE2b-Sandbox-Port: 8x\r\n",
        "E2b-Sandbox-Id: iabc\r\nE2b-Sandbox-Port: \r\n",
        "E2b-Sandbox-Id: ../x\r\nE2b-Sandbox-Port: 80\r\n",
        "E2b-Sandbox-Id: \r\nE2b-Sandbox-Port: 80\r\n",
        f"E2b-Sandbox-Id: {'i' * 65}\r\nE2b-Sandbox-Port: 80\r\n",
    ],
)
def test_half_or_malformed_targets(fields):
    with pytest.raises(HeadError) as caught:
        TargetParser(()).parse(get(fields))
    assert caught.value.status == 400


def test_headers_win_over_host():
    fields = "e2b-sandbox-id: iheader-client\r\nE2B-SANDBOX-PORT: 81\r\n"
    assert TargetParser(("sbx.test",)).parse(get(fields, host="Host: 80-ihost.sbx.test\r\n")) == SandboxTarget("iheader", 81)


@pytest.mark.parametrize(
    ("line", "port", "api"),
    [
        ("POST /sandboxes/iheader/connect", 49983, True),
        ("POST /v2/sandboxes/iheader/connect?x=1", 49983, True),
        ("POST /sandboxes/iheader/connect", 8000, False),
        ("GET /sandboxes/iheader/connect", 49983, False),
        ("POST /sandboxes/iheader/connect/more", 49983, False),
        ("POST /sandboxes/a/b/connect", 49983, False),
        ("POST /process.Process/Connect", 49983, False),
    ],
)
def test_a_call_to_connect_is_the_apis_although_older_clients_name_the_agents_port(line: str, port: int, api: bool):
    fields = f"E2b-Sandbox-Id: iheader\r\nE2b-Sandbox-Port: {port}\r\n"
    head = parse_request(f"{line} HTTP/1.1\r\nHost: 127.0.0.1\r\n{fields}\r\n".encode())
    assert TargetParser(()).parse(head) == (None if api else SandboxTarget("iheader", port))


INTERNAL = [
    "/init",
    "//init",
    "/./init",
    "/%69nit",
    "/init?x",
    "/init/",
    "/INIT",
    "/x/../init",
    "/%2e/init",
    "/%252e%252e/init",
    "/%2Finit",
    "\\init",
    "/\\init",
]
INTERNAL += [
    "/init;a=b",
    "/init%3Fx",
    "/init%00",
    "/in%69t/deep",
    "/..;/init",
    "/;/init",
    "/%2569nit",
    "/init%20",
    "/init#x",
    "/init/.."[:6] + "/.",
]
INTERNAL += ["/%" + "25" * 3 + "69nit", "/%" + "25" * 30 + "69nit"]
INTERNAL += ["/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade", "/provision/unpack", "/x/../Provision/user"]


@pytest.mark.parametrize("path", INTERNAL)
def test_internal_paths_never_pass(path):
    guard = EnvdPathGuard()
    with pytest.raises(ProxyRefusal) as caught:
        guard.check(SandboxTarget("i", 49983), path.encode())
    assert caught.value.status == 404
    assert caught.value.body["code"] == 404
    guard.check(SandboxTarget("i", 8000), path.encode())


@pytest.mark.parametrize(
    "path", ["/", "/initial", "/files/init", "/files?path=/init", "/health", "/process.Process/Start", "/x/%69nit", "*", "/.init"]
)
def test_other_paths_pass(path):
    EnvdPathGuard().check(SandboxTarget("i", 49983), path.encode())


@given(st.lists(st.sampled_from(["", ".", "%2e", "x/..", "%2f", "y/%2e%2e"]), max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_no_spelling_of_init_passes(prefix, escape):
    word = "".join(f"%{ord(char):02x}" if hidden else char for char, hidden in zip("init", escape, strict=True))
    assert first_segment(("/" + "".join(part + "/" for part in prefix) + word).encode()) == b"init"


BROWSER = "User-Agent: Mozilla/5.0\r\nAccept: text/html,*/*\r\n"


@pytest.mark.parametrize(
    ("fields", "html"),
    [
        (BROWSER, True),
        (BROWSER + "Sec-Fetch-Mode: navigate\r\n", True),  # what every browser sends for a page over TLS
        (BROWSER + "Sec-Fetch-Mode: cors\r\n", False),
        (BROWSER + "Sec-Fetch-Mode: websocket\r\n", False),
        ("User-Agent: Mozilla/5.0\r\nAccept: text/html, application/json\r\n", False),
        ("User-Agent: curl/8\r\nAccept: text/html\r\n", False),
        ("User-Agent: Mozilla/5.0\r\nAccept: */*\r\n", False),
        ("", False),
    ],
)
def test_only_people_get_html(fields, html):
    out = pages.render(pages.plain(502, "<b>no</b>"), get(fields), close=False)
    assert (b"text/html" in out) is html
    assert (b"<b>" in out) is not html
    assert (b"&lt;b&gt;" in out) is html


def test_exact_bodies():
    def body(refusal):
        return pages.render(refusal, None, close=False).partition(b"\r\n\r\n")[2]

    assert body(pages.sandbox_not_found("i1")) == b'{"sandboxId":"i1","message":"The sandbox was not found","code":502}'
    closed = b'{"sandboxId":"i1","message":"The sandbox is running but port is not open","port":8000,"code":502}'
    assert body(pages.port_not_open(SandboxTarget("i1", 8000))) == closed
    assert body(pages.api_down()) == b'{"code":503,"message":"The API is starting or down"}'


@pytest.mark.parametrize("error_class", errors.all_errors())
def test_every_error_of_a_table_has_an_answer(error_class):
    refusal = pages.from_error(error_class("why", "what next"), "i1")
    assert refusal.status == (502 if error_class is errors.NotFound else error_class.status)
    assert refusal.body["code"] == refusal.status
    assert refusal.body["message"]
