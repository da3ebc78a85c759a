"""Bad input and bad luck: each gives an error that names cause and next step, and nothing is lost."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.request

import pytest
from e2b import AuthenticationException, NotFoundException, Sandbox, SandboxException
from e2e_node import AENV


def call(node, method: str, path: str, body: bytes | None = None, key: str | None = None) -> tuple[int, dict]:
    request = urllib.request.Request(node.url + path, data=body, method=method)
    request.add_header("X-API-KEY", node.variables["E2B_API_KEY"] if key is None else key)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_bad_requests(node):
    create = "/v2/sandboxes"
    cases = {
        "unknown template": (create, b'{"templateID": "nosuch"}', (400, 404), "nosuch"),
        "malformed JSON": (create, b'{"templateID": ', (400,), "JSON"),
        "no template": (create, b"{}", (400,), "templateID"),
        "timeout 0": (create, b'{"templateID": "base", "timeout": 0}', (400,), "timeout"),
        "timeout negative": (create, b'{"templateID": "base", "timeout": -5}', (400,), "timeout"),
        "timeout absurd": (create, b'{"templateID": "base", "timeout": 999999999}', (400,), "imeout"),
        "metadata not a map": (create, b'{"templateID": "base", "metadata": [1]}', (400,), "metadata"),
        "fork of nothing": ("/sandboxes/inothere/fork", b"{}", (404,), "inothere"),
        "unknown route": ("/v9/nothing", b"{}", (404,), ""),
    }
    for name, (path, body, statuses, word) in cases.items():
        status, answer = call(node, "POST", path, body)
        assert status in statuses, (name, answer)
        assert answer["code"] == status, (name, answer)
        assert word in answer["message"], (name, answer)
    for bad in ("../../etc/passwd", "%2e%2e%2f", "a" * 10_000, "%00", "nonexistingsandbox"):
        status, _ = call(node, "DELETE", f"/sandboxes/{bad}")
        assert 400 <= status < 500, bad


def test_wrong_keys(node):
    assert call(node, "GET", "/sandboxes", key="e2b_" + "0" * 40)[0] == 401
    assert call(node, "GET", "/sandboxes", key="")[0] == 401
    with pytest.raises(AuthenticationException):
        Sandbox.create("base", **(node.options | {"api_key": "e2b_" + "0" * 40}))


def test_another_sandboxes_token_is_refused(node, sandbox):
    other = Sandbox.create("base", timeout=600, **node.options)
    try:
        headers = {"E2b-Sandbox-Id": other.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": sandbox._envd_access_token}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(node.url + "/files?path=/etc/passwd", headers=headers), timeout=30)
        assert refused.value.code == 401
        with pytest.raises(urllib.error.HTTPError) as hidden:
            urllib.request.urlopen(urllib.request.Request(node.url + "/init", data=b"{}", headers=headers, method="POST"), timeout=30)
        assert hidden.value.code == 404
    finally:
        other.kill()


def test_ports_out_of_range(node, sandbox):
    for port in ("0", "65536", "-1", "x", "99999999999"):
        headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": port}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(node.url + "/", headers=headers), timeout=30)
        assert refused.value.code == 400, port
        assert json.loads(refused.value.read())["code"] == 400


def test_sdk_errors(node, sandbox):
    with pytest.raises(NotFoundException):
        Sandbox.connect("inothere", **node.options)
    assert Sandbox.kill("nonexistingsandbox", **node.options) is False
    with pytest.raises(SandboxException):
        Sandbox.create("nosuchtemplate", **node.options)
    sandbox.pause()
    assert Sandbox.pause(sandbox.sandbox_id, **node.options) is False
    sandbox.connect(timeout=600)


def test_busy_port(node):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = node.environment | {"AENV_NODE_HOME": str(node.home) + "-none", "AENV_NODE_RUN": str(node.run) + "-none"}
        done = node.aenv("up", "--detach", "--port", str(port), check=False, env=environment)
        assert done.returncode != 0
        assert str(port) in done.stderr
        assert "--port" in done.stderr


def test_without_root(node):
    """As an ordinary user, who may read everything so that the interpreter is found wherever it is installed."""
    environment = node.environment | {"AENV_NODE_HOME": "/tmp/aenv-nobody", "AENV_NODE_RUN": "/tmp/aenv-nobody-run", "HOME": "/tmp"}
    plain = "setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
    done = subprocess.run(
        [*plain.split(), str(AENV), "up", "--detach"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "running as user 65534" in done.stderr
    assert "run the node server as root" in done.stderr


def test_without_fuse(node):
    """In a mount namespace of its own where /dev/fuse is gone."""
    environment = node.environment | {"AENV_NODE_HOME": "/tmp/aenv-nofuse", "AENV_NODE_RUN": "/tmp/aenv-nofuse-run"}
    script = f"mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 && exec {AENV} up --detach"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "/dev/fuse" in done.stderr
    assert "modprobe fuse" in done.stderr
