"""Domain mode with the official SDK over TLS: the local CA, real names from a name server, hosts of ports, signed URLs, auto-resume."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox
from e2e_node import Node, free_port
from wildcard_dns import WildcardDns, wildcard_dns

DOMAIN = "sbx.test"
Client = Callable[[str], Any]

#: Runs before every script: a client of its own, that trusts what the environment says, and patience for slow guests.
PRELUDE = """
import json, time
import httpx
from e2b import Sandbox

web = httpx.Client(timeout=60)

def served(url, client=web):
    end = time.monotonic() + 60
    while True:
        reply = client.get(url)
        if reply.status_code == 200 or time.monotonic() > end:
            return reply
        time.sleep(0.3)

def serve(sandbox, port=8000):
    sandbox.files.write("/srv/www/page.txt", "the page", user="root")
    sandbox.commands.run(f"exec python3 -m http.server {port} --directory /srv/www", background=True, timeout=0)
"""


@pytest.fixture(scope="module")
def domain_node(node: Node) -> Iterator[Node]:
    """The node of this run with its server started anew for a domain; put back in the end."""
    node.kill_server()
    node.aenv("up", "--detach", "--port", str(node.port), "--domain", f"{DOMAIN}:{free_port()}", timeout=600)
    yield node
    node.kill_server()
    node.up()


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WildcardDns]:
    with wildcard_dns(DOMAIN, tmp_path_factory.mktemp("dns")) as server:
        yield server


@pytest.fixture(scope="module")
def variables(domain_node: Node) -> dict[str, str]:
    """What `aenv env --domain` tells clients."""
    found: dict[str, str] = json.loads(domain_node.aenv("env", "--domain", "--json").stdout)
    return found


@pytest.fixture(scope="module")
def client(names: WildcardDns, variables: dict[str, str]) -> Client:
    """Runs a script as a user would: only the printed variables are set. Returns what it prints, as JSON."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("E2B_") and "SSL" not in name and "CA_" not in name}

    def run(script: str) -> Any:
        done = names.python(PRELUDE + script, keep | variables, 300)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
        return json.loads(done.stdout)

    return run


def test_variables(variables: dict[str, str], domain_node: Node) -> None:
    assert set(variables) == {"E2B_DOMAIN", "E2B_API_KEY", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"}
    ca = json.loads(domain_node.aenv("ca", "--json").stdout)
    assert ca["path"] == variables["NODE_EXTRA_CA_CERTS"]
    assert ca["domain"] == variables["E2B_DOMAIN"]


def test_a_port_has_a_host_of_its_own(client: Client) -> None:
    found = client(
        """
with Sandbox.create("base", timeout=600) as sandbox:
    said = sandbox.commands.run("echo over tls").stdout
    serve(sandbox)
    host = sandbox.get_host(8000)
    page = served(f"https://{host}/page.txt")
    two = served(f"https://{host}/page.txt", httpx.Client(http1=False, http2=True, timeout=60))
    closed = web.get(f"https://{sandbox.get_host(9999)}/")
    person = web.get(f"https://{sandbox.get_host(9999)}/", headers={"User-Agent": "Mozilla/5.0", "Accept": "text/html"})
    internal = web.post(f"https://{sandbox.get_host(49983)}/init", json={})
    running = sandbox.is_running()
gone = web.get(f"https://{host}/page.txt")
print(json.dumps({
    "said": said, "host": host, "id": sandbox.sandbox_id, "page": page.text, "two": [two.text, two.http_version],
    "closed": [closed.status_code, closed.json()], "person": person.headers["content-type"], "internal": internal.status_code,
    "running": running, "gone": [gone.status_code, gone.json()["message"]],
}))
"""
    )
    assert found["said"] == "over tls\n"
    assert found["host"].startswith(f"8000-{found['id']}.{DOMAIN}:")
    assert found["page"] == "the page"
    assert found["two"] == ["the page", "HTTP/2"]
    assert found["closed"] == [
        502,
        {"sandboxId": found["id"], "message": "The sandbox is running but port is not open", "port": 9999, "code": 502},
    ]
    assert found["person"].startswith("text/html")
    assert found["internal"] == 404
    assert found["running"] is True
    assert found["gone"] == [502, "The sandbox was not found"]


def test_signed_urls(client: Client) -> None:
    found = client(
        """
with Sandbox.create("base", timeout=600) as sandbox:
    sandbox.files.write("/home/user/a b.txt", "secured")
    down = web.get(sandbox.download_url("/home/user/a b.txt"))
    late = web.get(sandbox.download_url("/home/user/a b.txt", use_signature_expiration=-10))
    other = web.get(sandbox.download_url("/home/user/a b.txt").replace("a%20b", "a%20c"))
    up = web.post(sandbox.upload_url("/home/user/up.txt", use_signature_expiration=600), files={"file": b"x" * 3_000_000})
    size = len(sandbox.files.read("/home/user/up.txt"))
print(json.dumps([down.text, [late.status_code, late.json()], other.status_code, [up.status_code, up.json()], size]))
"""
    )
    down, late, other, up, size = found
    assert down == "secured"
    assert late == [401, {"code": 401, "message": "signature is already expired"}]
    assert other == 401
    assert up == [200, [{"path": "/home/user/up.txt", "name": "up.txt", "type": "file"}]]
    assert size == 3_000_000


def test_a_request_to_its_host_resumes_a_sandbox(client: Client) -> None:
    found = client(
        """
sandbox = Sandbox.create("base", timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
try:
    serve(sandbox)
    url = f"https://{sandbox.get_host(8000)}/page.txt"
    before = served(url).text
    sandbox.pause()
    state = sandbox.get_info().state
    after = web.get(url)
    print(json.dumps([before, str(getattr(state, "value", state)), after.status_code, after.text, sandbox.is_running()]))
finally:
    sandbox.kill()
"""
    )
    assert found == ["the page", "paused", 200, "the page", True]


def test_nothing_is_trusted_without_the_ca(names: WildcardDns, variables: dict[str, str]) -> None:
    url = f"https://api.{variables['E2B_DOMAIN']}/health"
    plain = names.run(["curl", "--silent", "--show-error", "--max-time", "20", "--cacert", "/etc/ssl/certs/ca-certificates.crt", url])
    assert plain.returncode == 60, plain.stderr  # curl's code for a certificate that no known authority has signed
    trusted = names.run(["curl", "--silent", "--fail", "--max-time", "20", "--cacert", variables["NODE_EXTRA_CA_CERTS"], url])
    assert trusted.returncode == 0, trusted.stderr


def test_single_host_mode_goes_on_beside_it(domain_node: Node) -> None:
    """With the address in E2B_SANDBOX_URL signed URLs name no sandbox; the signature does."""
    values = json.loads(domain_node.aenv("env", "--json").stdout)
    options = {"api_key": values["E2B_API_KEY"], "api_url": values["E2B_API_URL"], "sandbox_url": values["E2B_SANDBOX_URL"]}
    with Sandbox.create("base", timeout=600, **options) as one, Sandbox.create("base", timeout=600, **options) as other:
        for sandbox in (one, other):
            sandbox.files.write("/home/user/who.txt", sandbox.sandbox_id)
        for sandbox in (one, other):
            url = sandbox.download_url("/home/user/who.txt")
            assert sandbox.sandbox_id not in url
            assert httpx.get(url, timeout=60).text == sandbox.sandbox_id
            up = httpx.post(sandbox.upload_url("/home/user/in.txt"), files={"file": b"in"}, timeout=60)
            assert up.status_code == 200, up.text
            assert sandbox.files.read("/home/user/in.txt") == "in"
        url = one.download_url("/home/user/who.txt")
    end = time.monotonic() + 30
    while httpx.get(url, timeout=60).status_code == 200:
        assert time.monotonic() < end


def test_the_ca_outlives_the_server(domain_node: Node, variables: dict[str, str]) -> None:
    before = Path(variables["NODE_EXTRA_CA_CERTS"]).read_bytes()
    domain_node.kill_server()
    domain_node.aenv("up", "--detach", "--port", str(domain_node.port), "--domain", variables["E2B_DOMAIN"], timeout=600)
    assert Path(variables["NODE_EXTRA_CA_CERTS"]).read_bytes() == before
