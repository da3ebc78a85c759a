"""Signed file URLs without a sandbox in them, signed by the official SDK."""

import asyncio
from urllib.parse import quote

import pytest
from e2b.sandbox.signature import get_signature
from http2_client import Http2Client, fields
from proxy_rig import SANDBOX, FastTable, answer, replies, request

from agentenv.proxy.heads import parse_request
from agentenv.proxy.sandboxes import SandboxRoutes
from agentenv.proxy.signed_urls import SIGNED_CANDIDATES_MAX, SignedFile, parse_signed, signer_of
from agentenv.testing.fake_node import FakeNode

PATHS = ["/home/user/a.txt", "relative", "", "~/x y+z", "/a&b=c?d#e%2F", "/tëst/日本.txt", "/a:read:", "x" * 3000]


def target_for(path, operation, user, token, lasting=None):
    made = get_signature(path, operation, user, token, lasting)
    query = f"path={quote(path)}&signature={quote(made['signature'])}"
    if user is not None:
        query += f"&username={quote(user)}"
    if made["expiration"] is not None:
        query += f"&signature_expiration={made['expiration']}"
    return f"/files?{query}"


def parsed(target, method="GET"):
    return parse_signed(parse_request(f"{method} {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode()))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("operation", "method"), [("read", "GET"), ("read", "HEAD"), ("write", "POST")])
@pytest.mark.parametrize("user", [None, "root", "ü"])
@pytest.mark.parametrize("lasting", [None, 60, -60])
def test_the_signer_is_found_among_many(path, operation, method, user, lasting):
    """An expired signature finds its sandbox, too: envd then says that it is expired."""
    candidates = [(f"i{number}", f"token-{number}") for number in range(50)]
    file = parsed(target_for(path, operation, user, "token-7", lasting), method)
    assert signer_of(file, candidates) == "i7"
    assert signer_of(file, candidates[8:]) is None
    assert signer_of(file, []) is None


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/files"),
        ("GET", "/files?path=/a"),
        ("GET", "/files?path=/a&signature="),
        ("GET", "/file?path=/a&signature=v1_x"),
        ("GET", "/files/x?signature=v1_x"),
        ("GET", "/sandboxes?signature=v1_x"),
        ("PUT", "/files?path=/a&signature=v1_x"),
        ("DELETE", "/files?path=/a&signature=v1_x"),
        ("GET", "/files?signature=v1_x&" + "a=b&" * 50),
        ("GET", "/files?signature=v1_x&path=" + "a" * 20_000),
    ],
)
def test_what_is_no_signed_request_for_a_file(method, target):
    assert parsed(target, method) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace("a.txt", "b.txt"),
        lambda t: t + "&username=root",
        lambda t: t + "&signature_expiration=9999999999",
        lambda t: t.replace("v1_", "v2_"),
        lambda t: t[:-1],
        lambda t: t.replace("v1_", "v1_é%ff"),
    ],
)
def test_a_changed_url_finds_nobody(change):
    target = change(target_for("/a.txt", "read", None, "token"))
    if "é" in target:
        target = target.replace("é", "%C3%A9")
    assert signer_of(parsed(target), [(SANDBOX, "token")]) is None
    assert signer_of(parsed(target_for("/a.txt", "read", None, "token"), "POST"), [(SANDBOX, "token")]) is None


class SigningTable(FastTable):
    """Sends signed requests to one port of this host, whatever envd's port is."""

    port = 0

    def signer(self, file: SignedFile):
        return signer_of(file, [(SANDBOX, "token")])

    def route(self, sandbox, target):
        return super().route(sandbox, type(target)(target.sandbox_id, self.port))


async def test_signed_requests_reach_their_sandbox_and_others_the_api(rig):
    rig.table = SigningTable()
    envd = await rig.upstream(replies(*[answer(b"file")] * 3))
    rig.table.port = envd.port
    await rig.api(replies(*[answer(b"api")] * 4))
    await rig.start()
    client = await rig.client()
    good, bad = target_for("/a", "read", None, "token"), target_for("/a", "read", None, "other")
    host = "HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    assert (await client.ask(f"GET {good} {host}\r\n".encode())).body == b"file"
    assert (await client.ask(f"GET {bad} {host}\r\n".encode())).body == b"api"
    write = target_for("/a", "write", "root", "token")
    assert (await client.ask(f"POST {write} {host}Content-Length: 3\r\n\r\nabc".encode())).body == b"file"
    assert (await client.ask(f"POST {good} {host}Content-Length: 0\r\n\r\n".encode())).body == b"api"
    assert (await client.ask(request(80, path=good, sandbox="igone"))).status == 502  # a name in the headers goes first
    assert (await client.ask(f"GET {good} {host}E2b-Sandbox-Id: {SANDBOX}\r\n\r\n".encode())).status == 400
    http2 = Http2Client(*await asyncio.open_connection("127.0.0.1", rig.port))
    rig.closers.append(http2)
    assert (await http2.ask(fields(path=good))).body == b"file"


async def test_the_node_knows_its_running_sandboxes(tmp_path):
    node = FakeNode(tmp_path / "node")
    await node.start_server()
    try:
        routes = SandboxRoutes(node.orchestrator)
        ids = [await node.create() for _ in range(3)]

        def found(sandbox_id):
            return routes.signer(parsed(target_for("/a", "read", None, node.row(sandbox_id).access_token)))

        assert [found(sandbox_id) for sandbox_id in ids] == ids
        await node.orchestrator.pause(ids[0])
        await node.orchestrator.kill(ids[1])
        # A paused one would have to be resumed, which a signature does not allow (contract section 2.4).
        assert [found(sandbox_id) for sandbox_id in ids] == [None, None, ids[2]]
        await node.orchestrator.connect(ids[0], 60)
        assert found(ids[0]) == ids[0]
    finally:
        await node.close()


@pytest.mark.parametrize(("count", "finds"), [(SIGNED_CANDIDATES_MAX, True), (SIGNED_CANDIDATES_MAX + 1, False)])
def test_the_search_is_bounded(count, finds):
    class Many:
        def on_gone(self, listener):
            pass

        def peek_running(self):
            class Row:
                vm = object()

                def __init__(self, number):
                    self.sandbox_id, self.access_token = f"i{number}", f"token-{number}"

            return [Row(number) for number in range(count)]

    file = parsed(target_for("/a", "read", None, "token-5"))
    assert SandboxRoutes(Many()).signer(file) == ("i5" if finds else None)
