"""Who is let in, and what `/init` makes of a restored guest."""

import base64
import hashlib
import http.client
import json
import re
import resource
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from envd_rig import Envd, have

UNAUTHORIZED = {"code": 401, "message": "unauthorized access, please provide a valid access token or method signing if supported"}


def sign(path, operation, user, token, expiration=None):
    text = ":".join([path, operation, user, token, *([str(expiration)] if expiration else [])])
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture(scope="module")
def secured(binary):
    running = Envd(binary, "--allow-init-from", "any")
    running.init(accessToken="tok")
    yield running
    running.stop()


def test_token_guards_everything_but_health_and_init(secured):
    assert secured.request("GET", "/health")[0] == 204
    guarded = ["GET /metrics", "GET /envs", "POST /process.Process/List", "POST /files/compose", "GET /none"]
    for method, path in (line.split() for line in guarded):
        for headers in ({}, {"X-Access-Token": "tok2"}, {"X-Access-Token": ""}, {"Authorization": "Bearer tok"}):
            status, reply, body = secured.request(method, path, None, headers)
            assert (status, json.loads(body)) == (401, UNAUTHORIZED)
            assert reply["content-type"] == "application/json"
    assert secured.request("GET", "/envs", None, {"X-Access-Token": "tok"})[0] == 200
    assert secured.request("POST", "/init", "{}")[0] == 204
    assert secured.request("GET", "/none", None, {"X-Access-Token": "tok"})[0] == 404


def test_files_by_header_or_signature(secured):
    path = "/home/user/s.txt"
    write = sign(path, "write", "", "tok")

    def at(**query):
        return "/files?" + "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items())

    octets = {"Content-Type": "application/octet-stream"}
    status, _, body = secured.request("POST", at(path=path, signature=write), b"data", octets)
    assert (status, json.loads(body)) == (200, [{"name": "s.txt", "path": path, "type": "file"}])
    read = sign(path, "read", "", "tok")
    assert secured.request("GET", at(path=path, signature=read))[2] == b"data"
    assert secured.request("GET", at(path=path), None, {"X-Access-Token": "tok"})[2] == b"data"

    def refused(words, url, headers=None):
        status, _, body = secured.request("GET", url, None, headers)
        assert (status, json.loads(body)) == (401, {"code": 401, "message": words})

    refused("missing signature query parameter", at(path=path))
    refused("access token present in header but does not match", at(path=path, signature=read), {"X-Access-Token": "no"})
    refused("invalid signature", at(path=path, signature=write))
    refused("invalid signature", at(path=path + "x", signature=read))
    refused("invalid signature", at(path=path, signature=read, username="root"))
    past, future = int(time.time()) - 5, int(time.time()) + 60
    refused("signature is already expired", at(path=path, signature=sign(path, "read", "", "tok", past), signature_expiration=past))
    refused("invalid signature", at(path=path, signature=read, signature_expiration=past))
    good = at(path=path, signature=sign(path, "read", "root", "tok", future), signature_expiration=future, username="root")
    assert secured.request("GET", good)[2] == b"data"


def test_a_refused_large_upload_is_told_why(secured):
    body = b"x" * 20_000_000
    status, _, answer = secured.request("POST", "/files?path=x", body, {"Content-Type": "application/octet-stream", "X-Access-Token": "no"})
    assert (status, json.loads(answer)["message"]) == (401, "access token present in header but does not match")


def test_cors(secured):
    asked = {"Origin": "http://a.test", "Access-Control-Request-Headers": "authorization, x-access-token"}
    status, headers, _ = secured.request("OPTIONS", "/files?path=x", None, asked)
    assert (status, headers["access-control-allow-origin"]) == (204, "*")
    assert headers["access-control-allow-headers"] == "authorization, x-access-token"
    assert headers["access-control-allow-methods"] == "HEAD, GET, POST, PUT, PATCH, DELETE"
    status, headers, _ = secured.request("GET", "/envs", None, {"Origin": "http://a.test"})
    assert (status, headers["access-control-allow-origin"]) == (401, "*")


def test_init_is_for_the_host_only(binary):
    running = Envd(binary, "--allow-init-from", "169.254.0.22")
    try:
        status, _, body = running.request("POST", "/init", "{}")
        assert (status, json.loads(body)["code"]) == (404, 404)
    finally:
        running.stop()


def test_init_sets_and_is_idempotent(fresh):
    settings = {
        "envVars": {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "ione", "E2B_TEMPLATE_ID": "tone", "MINE": "1"},
        "accessToken": "tok",
        "defaultUser": "app",
        "defaultWorkdir": "/var/tmp",
        "hostname": "ione",
        "machineId": "0123456789abcdef" * 2,
        "entropySeed": base64.b64encode(bytes(range(64))).decode(),
        "dnsServers": ["1.2.3.4", "8.8.8.8"],
        "lifecycleID": "ignored",
    }
    fresh.path("/etc/resolv.conf").unlink()
    fresh.path("/etc/resolv.conf").symlink_to("/run/systemd/resolve/stub-resolv.conf")
    for _ in range(2):
        assert fresh.init(**settings)["x-envd-version"] == "0.6.13"
    token = {"X-Access-Token": "tok"}
    assert json.loads(fresh.request("GET", "/envs", None, token)[2]) == settings["envVars"]
    result = fresh.shell("id -un; pwd; echo $MINE; hostname; cat /etc/hostname /etc/machine-id", headers=token).result()
    assert result.stdout.decode().split() == ["app", "/var/tmp", "1", "ione", "ione", "0123456789abcdef" * 2]
    hosts = fresh.path("/etc/hosts").read_text()
    assert len(re.findall(r"^127\.0\.1\.1 ione ", hosts, re.M)) == 1
    assert re.search(r"^127\.0\.0\.1\s+localhost", hosts, re.M)
    assert fresh.path("/etc/resolv.conf").read_text().splitlines()[1:] == ["nameserver 1.2.3.4", "nameserver 8.8.8.8"]
    assert fresh.path("/run/e2b/.E2B_SANDBOX_ID").read_text() == "ione"
    assert fresh.path("/run/e2b/.E2B_SANDBOX").read_text() == "true"
    # Another sandbox of the same snapshot: no trace of the first one is left.
    fresh.init(envVars={"E2B_SANDBOX_ID": "itwo"}, accessToken="", hostname="itwo", dnsServers=["9.9.9.9"])
    assert "ione" not in fresh.path("/etc/hosts").read_text()
    assert not fresh.path("/run/e2b/.E2B_SANDBOX").exists()
    assert fresh.path("/run/e2b/.E2B_SANDBOX_ID").read_text() == "itwo"
    assert "9.9.9.9" in fresh.path("/etc/resolv.conf").read_text()
    assert json.loads(fresh.request("GET", "/envs")[2]) == {"E2B_SANDBOX_ID": "itwo"}


def test_init_leaves_a_resolver_of_the_image_alone(fresh):
    fresh.path("/etc/resolv.conf").unlink()
    fresh.path("/etc/resolv.conf").write_text("options ndots:5\nnameserver 10.0.0.1\n")
    fresh.init(dnsServers=["1.2.3.4"])
    assert "1.2.3.4" not in fresh.path("/etc/resolv.conf").read_text()


def test_init_with_little_or_nothing(fresh):
    assert fresh.request("POST", "/init")[0] == 204
    assert fresh.request("POST", "/init", json.dumps({"envVars": None, "accessToken": None, "volumeMounts": []}))[0] == 204
    assert fresh.request("GET", "/init")[0] == 405


def test_init_mistakes_change_nothing(fresh):
    fresh.init(envVars={"A": "1"})
    for mistake, words in (
        ({"hostname": "a b"}, "hostname"),
        ({"machineId": "xyz"}, "machineId"),
        ({"entropySeed": "AAAA"}, "entropySeed"),
        ({"entropySeed": "?"}, "base64"),
        ({"timestamp": "yesterday"}, "timestamp"),
        ({"dnsServers": ["not-an-address"]}, "IP"),
        ({"envVars": {"X=Y": "1"}}, "X=Y"),
    ):
        status, _, body = fresh.request("POST", "/init", json.dumps({"envVars": {"A": "2"}, **mistake}))
        assert (status, words in json.loads(body)["message"]) == (400, True), body
    assert fresh.request("POST", "/init", "{")[0] == 400
    assert json.loads(fresh.request("GET", "/envs")[2]) == {"A": "1"}


def test_metrics(envd):
    status, _, body = envd.request("GET", "/metrics")
    metrics = json.loads(body)
    assert status == 200
    names = ["ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "mem_cache", "mem_total_mib", "mem_used_mib", "disk_used"]
    assert sorted(metrics) == sorted([*names, "disk_total"])
    assert abs(metrics["ts"] - time.time()) < 5
    assert 0 <= metrics["cpu_used_pct"] <= 100
    assert metrics["mem_total"] >> 20 == metrics["mem_total_mib"]
    assert 0 < metrics["disk_used"] < metrics["disk_total"]


def test_a_guest_that_holds_all_connections_does_not_shut_the_host_out(binary):
    """Only peers that may not call `/init` are counted."""
    running = Envd(binary, "--allow-init-from", "127.0.0.9")
    resource.setrlimit(resource.RLIMIT_NOFILE, (16384, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    resource.prlimit(running.child.pid, resource.RLIMIT_NOFILE, (16384, 16384))
    held = []
    try:
        for _ in range(4096):
            held.append(socket.create_connection(("127.0.0.1", running.port), timeout=10))
        with pytest.raises(OSError):
            running.request("GET", "/health", timeout_s=5)
        host = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10, source_address=("127.0.0.9", 0))
        host.request("POST", "/init", "{}")
        assert host.getresponse().status == 204
        held.pop().close()
        deadline = time.monotonic() + 5
        while True:
            try:
                assert running.request("GET", "/health")[0] == 204
                break
            except OSError:
                assert time.monotonic() < deadline
    finally:
        for connection in held:
            connection.close()
        running.stop()


def test_http2_with_prior_knowledge(envd):
    if not have("curl"):
        pytest.skip("needs curl")
    command = ["curl", "-s", "--http2-prior-knowledge", "-o", "/dev/null", "-w", "%{http_version} %{http_code}", f"{envd.url}/health"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout == "2 204"


def test_ended_processes_keep_no_descriptors(envd):
    folder = Path(f"/proc/{envd.child.pid}/fd")
    envd.run("true")
    before = len(list(folder.iterdir()))
    for _ in range(20):
        envd.run("true")
        envd.start("/bin/true", pty={}).result()
        envd.open("process.Process/Start", {"process": {"cmd": "/bin/true"}}).result()
    assert len(list(folder.iterdir())) <= before + 4
