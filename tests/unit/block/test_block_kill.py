"""The real blockd, killed while it writes a layer: none appears that is not whole, what is left is the sweep's, a repeat works."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentenv.host import native
from agentenv.snapshot.layers import LayerStore

CONTENT_BYTES = 96 << 20
_DEADLINE_S = 60.0
pytestmark = pytest.mark.usefixtures("root")


class Blockd:
    def __init__(self, folder: Path) -> None:
        self.socket, self.mount = folder / "socket", folder / "mount"
        command = [native.program("blockd"), "serve", "--socket", self.socket, "--mount", self.mount]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://blockd", timeout=_DEADLINE_S)
        until(self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/v1/info").status_code == 200
        return False

    def call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self.http.request(method, path, json=body)
        assert reply.status_code < 300, reply.text
        return dict(reply.json())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(_DEADLINE_S)
        subprocess.run(["umount", "-l", self.mount], check=False, stderr=subprocess.DEVNULL)
        self.http.close()


def until(condition, what: str = "blockd does not answer") -> None:
    end = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[Blockd]]:
    """The daemons of a test, the last of which is killed with it."""
    daemons = [Blockd(tmp_path)]
    yield daemons
    daemons[-1].kill()


@pytest.mark.parametrize("verb", ["imports", "commits", "compressed commits"])
def test_a_layer_is_whole_or_not_there(verb: str, running: list[Blockd], tmp_path: Path) -> None:
    layers = LayerStore(tmp_path / "layers")
    raw = tmp_path / "raw"
    raw.write_bytes(os.urandom(1 << 20) * (CONTENT_BYTES >> 20))
    lower, output = layers.path("lower"), layers.path("wanted")
    blockd = running[-1]
    blockd.call("POST", "/v1/imports", {"source": str(raw), "output": str(lower)})
    body: dict[str, Any] = {"source": str(raw), "output": str(output)}
    if verb != "imports":
        body = {"lowers": [str(lower)], "output": str(output)}
    if verb == "compressed commits":
        body["compression"] = {"algorithm": "zstd"}
    path = f"/v1/{verb.split()[-1]}"

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            blockd.http.post(path, json=body)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: any(file.name.startswith("wanted") and file.stat().st_size for file in layers.files()), "nothing is written")
    blockd.kill()
    asking.join(_DEADLINE_S)
    assert not output.exists(), "it was over before it could be killed: raise CONTENT_BYTES"
    left = {file.name for file in layers.unneeded(layers.files(), {"lower"})}
    assert left == {"wanted.lsmt.tmp"}
    running.append(Blockd(tmp_path))
    running[-1].call("POST", path, body)
    assert {file.name for file in layers.files()} == {"lower.lsmt", "wanted.lsmt"}
    running[-1].call("PUT", "/v1/stacks/s", {"lowers": [str(output)]})
    assert (running[-1].mount / "s").read_bytes() == raw.read_bytes()
