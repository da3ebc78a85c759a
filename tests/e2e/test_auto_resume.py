"""Sandboxes that traffic wakes: by whom, once however many ask, and for how long. Real guests behind the real proxy."""

from __future__ import annotations

import concurrent.futures
import json
import time
import urllib.error
import urllib.request
import uuid
from datetime import UTC, datetime

import pytest
from e2b import Sandbox, SandboxState
from guest_programs import wait_for

PORT = 8000
POLICY = {"on_timeout": "pause", "auto_resume": True}


def ask(node, sandbox_id: str, port: int = PORT, path: str = "/", **headers: str) -> tuple[int, bytes]:
    """A request as anybody may send it; status and body."""
    routing = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(port)}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(node.url + path, headers=routing | named), timeout=90) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def resumes(node, sandbox_id: str) -> int:
    """How often it was resumed, by its own log."""
    lines = node.aenv("logs", sandbox_id, "--json").stdout.splitlines()
    return sum(json.loads(line)["message"] == "resumed" for line in lines if line.startswith("{"))


@pytest.fixture
def make(node):
    """Creates sandboxes with a web server that counts its requests in memory, and ends them."""
    made: list[Sandbox] = []

    def create(**options) -> Sandbox:
        sandbox = Sandbox.create("base", **{"timeout": 600, "lifecycle": POLICY, **options}, **node.options)
        made.append(sandbox)
        sandbox.files.write("/home/user/hello", "hello")
        sandbox.commands.run(f"exec python3 -m http.server {PORT}", background=True, timeout=0)
        token = {} if sandbox.traffic_access_token is None else {"e2b_traffic_access_token": sandbox.traffic_access_token}
        wait_for(lambda: ask(node, sandbox.sandbox_id, path="/hello", **token) == (200, b"hello"), "its web server does not start")
        return sandbox

    yield create
    for sandbox in made:
        sandbox.kill()


def test_fifty_requests_at_once_wake_it_once_and_all_are_answered(node, make):
    sandbox = make()
    sandbox.pause()
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: ask(node, sandbox.sandbox_id, path="/hello"), range(50)))
    assert answers == [(200, b"hello")] * 50
    assert resumes(node, sandbox.sandbox_id) == 1


@pytest.mark.parametrize(("created_s", "least_s"), [(60, 300), (1200, 1200)])
def test_it_lives_as_long_as_it_was_created_for_and_at_least_five_minutes(node, make, created_s: int, least_s: int):
    sandbox = make(timeout=created_s)
    sandbox.set_timeout(0)
    assert sandbox.get_info().state == SandboxState.PAUSED
    before = time.time()
    assert sandbox.commands.run("echo awake").stdout == "awake\n"
    left_s = sandbox.get_info().end_at.replace(tzinfo=UTC).timestamp() - before
    assert least_s <= left_s <= least_s + (datetime.now(UTC).timestamp() - before) + 1


def test_only_those_who_may_come_in_wake_it(node, make):
    private = make(network={"allow_public_traffic": False})
    private.pause()
    for headers in ({}, {"e2b_traffic_access_token": "wrong"}):
        assert ask(node, private.sandbox_id, path="/hello", **headers)[0] == 403
    for headers in ({}, {"x_access_token": "wrong"}):
        status, body = ask(node, private.sandbox_id, 49983, "/envs", **headers)
        assert (status, json.loads(body)["state"]) == (502, "paused")
    assert private.get_info().state == SandboxState.PAUSED
    assert resumes(node, private.sandbox_id) == 0
    token = private.traffic_access_token
    assert ask(node, private.sandbox_id, path="/hello", e2b_traffic_access_token=token) == (200, b"hello")
    assert resumes(node, private.sandbox_id) == 1


def test_a_disk_alone_is_never_woken(node, make):
    sandbox = make()
    sandbox.pause(mode="filesystem")
    assert ask(node, sandbox.sandbox_id, path="/hello")[0] == 502
    assert not sandbox.is_running()
    assert sandbox.get_info().state == SandboxState.PAUSED


def test_policy_tokens_and_repeated_creations_outlive_a_restart_of_the_server(node, make):
    key = f"restart-{uuid.uuid4()}"  # remembered for a day, and this home may be older than this run
    sandbox = make(idempotency_key=key, network={"allow_public_traffic": False, "mask_request_host": "masked:${PORT}"})
    shown = sandbox.get_info()
    sandbox.pause()
    node.kill_server()
    node.up()
    again = Sandbox.create(
        "base",
        timeout=600,
        lifecycle=POLICY,
        idempotency_key=key,
        network={"allow_public_traffic": False, "mask_request_host": "masked:${PORT}"},
        **node.options,
    )
    assert (again.sandbox_id, again.traffic_access_token) == (sandbox.sandbox_id, sandbox.traffic_access_token)
    assert (sandbox.get_info().lifecycle, sandbox.get_info().network) == (shown.lifecycle, shown.network)
    assert ask(node, sandbox.sandbox_id, path="/hello", e2b_traffic_access_token=again.traffic_access_token) == (200, b"hello")
    assert sandbox.commands.run("cat hello").stdout == "hello"


def test_programs_see_the_masked_host(node, make):
    sandbox = make(network={"mask_request_host": "masked.test:${PORT}"})
    sandbox.files.write(
        "/home/user/echo.py",
        """
import http.server
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{self.headers['Host']} {self.headers['X-Forwarded-Host']}".encode())
http.server.HTTPServer(("", 8001), Echo).serve_forever()
""",
    )
    sandbox.commands.run("exec python3 echo.py", background=True, timeout=0)
    wait_for(lambda: ask(node, sandbox.sandbox_id, 8001)[0] == 200, "the echo does not start")
    asked_for = node.url.removeprefix("http://")
    assert ask(node, sandbox.sandbox_id, 8001)[1].decode() == f"masked.test:8001 {asked_for}"
