"""A code interpreter server on this machine, with this Python and bash, and a guest agent that is a small HTTP server."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from http_stub import served

import agentenv

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from importlib import import_module as i; i(sys.argv[2]).entry()"
_START_DEADLINE_S = 120.0
DEADLINE_S = 60.0

Line = dict[str, Any]


@dataclass
class Agent:
    """What the guest agent would say."""

    token: str = "secret"
    variables: dict[str, str] = field(default_factory=dict)
    url: str = ""


@contextmanager
def agent_server() -> Iterator[Agent]:
    agent = Agent()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("X-Access-Token") == agent.token
            body = json.dumps(agent.variables if known else {"code": 401, "message": "no"}).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Silence."""

    with served(Handler) as host:
        agent.url = f"http://{host}/envs"
        yield agent


class Interpreter:
    """The server's process and its API."""

    def __init__(self, home: Path, agent: Agent, preload: str) -> None:
        self.home, self.agent = home, agent
        self.id_file = home / "sandbox-id"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        package = Path(agentenv.__file__).parents[1]
        options = ["--port", str(self.port), "--host", "127.0.0.1", "--home", str(home), "--preload", preload]
        options += ["--envs-url", agent.url, "--id-file", str(self.id_file)]
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}
        self.log = home / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(package), "agentenv.interpreter.server", *options],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=home,
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE_S)

    def wait_healthy(self) -> None:
        end = time.monotonic() + _START_DEADLINE_S
        while True:
            try:
                if self.http.get("/health").text == "OK":
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def close(self) -> None:
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()

    def raw(self, code: str, **fields: Any) -> httpx.Response:
        token = {"X-Access-Token": fields.pop("token")} if "token" in fields else {}
        return self.http.post("/execute", json={"code": code, **fields}, headers=token)

    def run(self, code: str, **fields: Any) -> list[Line]:
        """The lines of a cell, after a check of what holds for every reply."""
        reply = self.raw(code, **fields)
        assert reply.status_code == 200, reply.text
        assert reply.content.isascii()
        assert reply.content.endswith(b"\n")
        lines = [json.loads(line) for line in reply.content.split(b"\n")[:-1]]
        assert lines[-1] == {"type": "end_of_execution"}
        assert [line["type"] for line in lines].count("end_of_execution") == 1
        told: list[Line] = []
        for line in lines[:-1]:
            if line["type"] in ("stdout", "stderr"):
                assert line.pop("timestamp").startswith("20")
            if told and line["type"] in ("stdout", "stderr") and told[-1]["type"] == line["type"]:
                told[-1]["text"] += line["text"]  # where output is cut is a matter of time
            elif line["type"] != "keepalive":
                told.append(line)
        return told

    def value(self, code: str, **fields: Any) -> str | None:
        """The text of the main result."""
        lines = self.run(code, **fields)
        assert not [line for line in lines if line["type"] == "error"], lines
        return next((line.get("text") for line in lines if line["type"] == "result" and line["is_main_result"]), None)

    def output(self, code: str, stream: str = "stdout", **fields: Any) -> str:
        return "".join(line["text"] for line in self.run(code, **fields) if line["type"] == stream)

    def error(self, code: str, **fields: Any) -> Line:
        (error,) = [line for line in self.run(code, **fields) if line["type"] == "error"]
        return error

    def hang_up(self, code: str, until: str, **fields: Any) -> None:
        """Run a cell and close the connection once its output has `until`."""
        with self.http.stream("POST", "/execute", json={"code": code, **fields}) as reply:
            for line in reply.iter_lines():
                if until in json.loads(line).get("text", ""):
                    return
        raise AssertionError("the cell ended first")


@contextmanager
def interpreter(preload: str = "") -> Iterator[Interpreter]:
    with tempfile.TemporaryDirectory(prefix="aenv-interpreter-") as folder, agent_server() as agent:
        made = Interpreter(Path(folder), agent, preload)
        try:
            made.wait_healthy()
            yield made
        finally:
            made.close()
