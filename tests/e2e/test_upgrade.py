"""A new server takes the place of the old one while clients are at work: nobody is refused, nothing is cut off."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2b import Sandbox

STREAM = "i=0; until [ -e /tmp/enough ]; do i=$((i+1)); echo $i; sleep 0.05; done"


class Client(threading.Thread):
    """Repeats one request until told to stop; nothing is forgiven and nothing repeated."""

    def __init__(self, request: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._request, self._stopped = request, threading.Event()
        self.answers, self.slowest_s = 0, 0.0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                begun = time.monotonic()
                self._request()
                self.answers += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
                time.sleep(0.01)
        except Exception as error:  # noqa: BLE001 - it is looked at in the end
            self.error = error

    def finish(self) -> None:
        self._stopped.set()
        self.join(timeout=60)
        assert not self.is_alive()
        assert self.error is None, f"after {self.answers} answers: {self.error!r}"
        assert self.answers > 10


def connection(node) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)


def ask(kept: http.client.HTTPConnection, path: str, headers: dict[str, str], body: bytes | None = None) -> bytes:
    kept.request("GET" if body is None else "POST", path, body, headers)
    answer = kept.getresponse()
    content = answer.read()
    assert answer.status in (200, 204), (answer.status, content)
    return content


@pytest.fixture
def served(node, sandbox):
    """A web server in the sandbox, and the headers that lead to it."""
    sandbox.commands.run("mkdir -p /tmp/web; echo hello > /tmp/web/index.html")
    sandbox.commands.run("cd /tmp/web; nohup python3 -m http.server 8000 > /dev/null 2>&1 &")
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"}
    end = time.monotonic() + 60
    while True:
        try:
            assert ask(connection(node), "/", headers) == b"hello\n"
            return headers
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def test_a_reload_under_load_loses_no_request(node, sandbox, served):
    lines: list[str] = []
    stream = sandbox.commands.run(STREAM, background=True, timeout=0)
    reader = threading.Thread(target=lambda: stream.wait(on_stdout=lambda text: lines.extend(text.split())), daemon=True)
    reader.start()
    kept, kept_api = connection(node), connection(node)
    key = {"X-API-KEY": node.variables["E2B_API_KEY"]}
    clients = [
        Client(lambda: ask(connection(node), "/", served)),  # a connection for each request
        Client(lambda: ask(kept, "/", served)),  # one that is kept, and not opened again unless the answer says so
        Client(lambda: ask(kept_api, "/v2/sandboxes", key)),
        Client(lambda: sandbox.files.write("/tmp/small", "x")),
    ]
    for client in clients:
        client.start()
    pids = [node.server_pid()]
    try:
        for _ in range(2):
            time.sleep(2)
            node.aenv("reload", timeout=200)
            pids.append(node.server_pid())
        assert len(set(pids)) == 3, pids
        assert Path(f"/proc/{pids[0]}").exists(), "the server with the stream has ended before it"
        time.sleep(2)
        other = Sandbox.create("base", timeout=600, **node.options)
        other.kill()
    finally:
        for client in clients:
            client.finish()
    sandbox.files.write("/tmp/enough", "")
    reader.join(timeout=200)
    assert not reader.is_alive()
    assert len(lines) > 20
    assert lines == [str(i) for i in range(1, len(lines) + 1)], "the stream has a gap"
    kept.close()
    kept_api.close()
    end = time.monotonic() + 120
    while is_running(pids[0]) and time.monotonic() < end:
        time.sleep(0.2)
    assert not is_running(pids[0]), "the first server outlives its last connection"
    print("slowest answers, seconds:", [round(client.slowest_s, 2) for client in clients])


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_stream_in_the_old_server_ends_with_its_sandbox(node):
    doomed = Sandbox.create("base", timeout=600, **node.options)
    endless = doomed.commands.run("sleep 600", background=True, timeout=0)
    ended: list[Exception] = []

    def wait() -> None:
        try:
            endless.wait()
        except Exception as error:  # noqa: BLE001 - any end will do
            ended.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    node.aenv("reload", timeout=200)
    assert waiter.is_alive()
    doomed.kill()
    waiter.join(timeout=30)
    assert ended, "the client waits for a sandbox that is gone"
