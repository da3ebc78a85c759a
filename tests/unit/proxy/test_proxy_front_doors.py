"""The real API behind every front door: plain, TLS, HTTP/2. Cases G07 and G08: nothing opens without a key, whichever way one comes."""

import asyncio
import json
import ssl

import pytest
from http2_client import Http2Client, fields

from agentenv.api.app import create_app
from agentenv.api.auth import KeyRing
from agentenv.api.serve import api_server, bind_unix
from agentenv.api.settings import ApiSettings
from agentenv.core.clock import SystemClock
from agentenv.core.errors import InvalidInput
from agentenv.proxy.authority import LocalAuthority
from agentenv.proxy.tls import TlsIdentity
from agentenv.testing.fake_orchestrator import FakeOrchestrator

KEY = "e2b_" + "ab" * 20
WRONG = [{}, {"x-api-key": "e2b_" + "0" * 40}, {"x-api-key": KEY[:-1]}, {"authorization": "Bearer nonsense"}]


@pytest.fixture
async def doors(rig, tmp_path):
    """`doors(kind, method, path, headers)` asks the API through one of them and returns status and body."""
    app = create_app(FakeOrchestrator(), KeyRing([KEY]), ApiSettings(domain="sbx.test"))
    server, listener = api_server(app), bind_unix(rig.api_path)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await rig.start()
    authority = LocalAuthority(tmp_path / "ca", "sbx.test", SystemClock())
    authority.ensure()
    tls_port = await rig.proxy.start(ssl_context=TlsIdentity(authority.cert_file, authority.key_file).context)
    tls = ssl.create_default_context(cafile=authority.ca_file)
    http2 = Http2Client(*await asyncio.open_connection("127.0.0.1", rig.port))
    rig.closers.append(http2)
    plain = await rig.client()
    rig.port, plain_port = tls_port, rig.port
    secure = await rig.client(ssl=tls, server_hostname="api.sbx.test")
    rig.port = plain_port

    async def ask(kind, method, path, headers):
        if kind == "http2":
            found = await http2.ask(fields(method=method, path=path, authority="api.sbx.test", extra=list(headers.items())))
            return found.status, found.body
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        host = "127.0.0.1" if kind == "plain" else "api.sbx.test"
        peer = plain if kind == "plain" else secure
        found = await peer.ask(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{lines}\r\n".encode())
        return found.status, found.body

    paths = app.openapi()["paths"]
    ask.routes = [(method.upper(), path) for path, methods in paths.items() if path != "/health" for method in methods]
    yield ask
    server.should_exit = True
    await asyncio.wait_for(task, 20)
    listener.close()


@pytest.mark.parametrize("kind", ["plain", "tls", "http2"])
async def test_no_route_opens_without_a_key(doors, kind):
    assert len(doors.routes) > 30
    for method, path in doors.routes:
        for headers in WRONG:
            status, body = await doors(kind, method, path.replace("{", "").replace("}", "").replace(":path", ""), headers)
            # The content of volumes has tokens of its own, and error codes in words (contract section 2.9).
            assert status in (401, 403, 404), (method, path, headers, status, body)
            assert "code" in json.loads(body)
    assert (await doors(kind, "GET", "/health", {}))[0] in (200, 204)
    assert await doors(kind, "GET", "/v2/sandboxes", {"x-api-key": KEY}) == (200, b"[]")


@pytest.mark.parametrize("text", ["", "\n\n", "# e2b_" + "a" * 40 + "\n", "short\n"])
def test_a_node_without_a_key_does_not_start(tmp_path, text):
    """There is no open mode: the server reads its keys before it listens, on loopback and beyond."""
    file = tmp_path / "api-key"
    with pytest.raises(InvalidInput):
        KeyRing.from_file(file)
    file.write_text(text)
    with pytest.raises(InvalidInput):
        KeyRing.from_file(file)
