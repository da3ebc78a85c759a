"""Over a real socket: ids of every kind in paths, bodies that trickle or stop, and who may reach a Unix socket."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI

from agentenv.api import request_parts
from agentenv.api.serve import api_server, bind_unix
from agentenv.core.errors import AgentEnvError

STRANGE_IDS = [
    "nonexistingsandbox",
    "a%2Fb",
    "..",
    "%2E%2E",
    "..%2F..%2Fetc%2Fpasswd",
    "team%2Fname%3Av1",
    "%00",
    "i%00abc",
    "%0A",
    "iabc%0A",
    "%FF%FE",
    "%",
    "%zz",
    "UPPER",
    "-",
    "-suffix",
    "%D0%B8",
    "%ED%A0%80",
    "%20",
    "i" * 65,
    "x" * 10_240,
    "%2F" * 3_000,
]


async def talk(port: int, request: bytes, *, timeout_s: float = 10) -> tuple[int, bytes]:
    """Send raw bytes, return the status and the body of the one reply."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            await writer.drain()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            return int(head.split(b" ", 2)[1]), body
        finally:
            writer.close()


async def get(port: int, key: str, path: str) -> tuple[int, bytes]:
    return await talk(port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-API-KEY: {key}\r\n\r\n".encode())


@pytest.mark.parametrize("method_and_suffix", ["GET ", "DELETE ", "POST /pause", "POST /timeout", "POST /fork"])
async def test_strange_ids_are_clean_errors(method_and_suffix: str, live_port: int, key: str):
    method, suffix = method_and_suffix.split(" ")
    for sandbox_id in STRANGE_IDS:
        head = f"{method} /sandboxes/{sandbox_id}{suffix} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-API-KEY: {key}\r\n"
        content = b'{"timeout":5}' if method == "POST" and suffix != "/pause" else b""
        request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
        status, body = await talk(live_port, request)
        assert status == 404, (sandbox_id[:40], body)
        assert json.loads(body)["code"] == 404
        assert len(body) < 1000, "the reply repeats what was sent"


@pytest.mark.parametrize("path", ["/templates/{}", "/templates/aliases/{}"])
async def test_strange_template_references_are_404(path: str, live_port: int, key: str):
    for reference in STRANGE_IDS:
        status, body = await get(live_port, key, path.format(reference))
        assert (status, json.loads(body)["code"]) == (404, 404), reference[:40]


async def test_a_raw_nul_in_the_path_is_refused(live_port: int, key: str):
    status, _ = await get(live_port, key, "/sandboxes/a\0b")
    assert 400 <= status < 500


async def test_an_escaped_slash_does_not_reach_another_route(live_port: int, key: str):
    status, _ = await get(live_port, key, "/%68ealth")
    assert status == 404
    status, body = await get(live_port, key, "/sandboxes%2Fx")
    assert (status, json.loads(body)["message"]) == (404, "no route GET /sandboxes%2Fx")


async def test_id_with_client_suffix(client: httpx.AsyncClient):
    sandbox_id = (await client.post("/v2/sandboxes", json={"templateID": "base"})).json()["sandboxID"]
    assert (await client.get(f"/sandboxes/{sandbox_id}-0a1b2c3d-more")).json()["sandboxID"] == sandbox_id
    assert (await client.get(f"/sandboxes/{quote(sandbox_id)}%2D0a1b")).json()["sandboxID"] == sandbox_id


async def test_chunked_body(live_port: int, key: str):
    content = b'{"templateID":"base"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"
    head = f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-API-KEY: {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert (await talk(live_port, head.encode() + chunks))[0] == 201


async def test_a_declared_giant_is_refused_unread(live_port: int, key: str):
    head = f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: {key}\r\nContent-Length: 99999999999\r\n\r\n"
    status, body = await talk(live_port, head.encode())
    assert (status, json.loads(body)["error_code"]) == (413, "body_too_large")


async def test_a_body_that_never_ends_is_given_up(live_port: int, key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_parts, "BODY_DEADLINE_S", 0.2)
    head = f'POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: {key}\r\nContent-Length: 50\r\n\r\n{{"templ'
    status, body = await talk(live_port, head.encode())
    assert (status, json.loads(body)["error_code"]) == (408, "body_too_slow")


async def test_a_caller_who_leaves_half_way_harms_nobody(live_port: int, key: str):
    _, writer = await asyncio.open_connection("127.0.0.1", live_port)
    writer.write(f'POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: {key}\r\nContent-Length: 50\r\n\r\n{{"templ'.encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{live_port}", headers={"X-API-KEY": key}) as client:
        assert (await client.get("/sandboxes")).json() == []


async def test_unix_socket_is_for_its_owner_only(app: FastAPI, key: str, tmp_path: Path):
    path = tmp_path / "api.sock"
    bind_unix(path).close()  # what a server that died leaves behind
    listener = bind_unix(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server = api_server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://api.test") as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert (await client.get("/templates", headers={"X-API-KEY": key})).status_code == 200
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 15)
        listener.close()


def test_a_file_in_the_way_of_the_socket_is_not_removed(tmp_path: Path):
    path = tmp_path / "api.sock"
    path.write_text("precious")
    with pytest.raises((OSError, AgentEnvError), match=r"api\.sock|in use"):
        bind_unix(path)
    assert path.read_text() == "precious"
