"""Ways to run `aenv` in tests: in this process, or as a process of its own with a node that has no VMs."""

import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner, Result

import agentenv
from agentenv.cli.main import cli
from agentenv.testing.fake_orchestrator import FakeOrchestrator

KEY = "e2b_" + "ab" * 20
SOURCE = Path(agentenv.__file__).parents[1]
FAKE_SITE = Path(__file__).parent / "fake_site"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, deadline_s=30.0):
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return found


@dataclass
class Server:
    url: str
    orchestrator: FakeOrchestrator
    key: str = KEY

    @property
    def environment(self) -> dict[str, str]:
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.key}


@dataclass
class Aenv:
    """Runs `aenv` in this process against `server`."""

    server: Server

    def __call__(self, *arguments: str, input: str | None = None) -> Result:
        return CliRunner().invoke(cli, list(arguments), env=self.server.environment, prog_name="aenv", input=input)

    def start(self, *arguments: str) -> str:
        result = self("start", *arguments)
        assert result.exit_code == 0, result.output
        return result.stdout.strip()


def aenv_process(*arguments: str, **settings) -> subprocess.CompletedProcess:
    """Runs `aenv` as a process of its own, with the fake wiring."""
    return subprocess.run(
        [sys.executable, "-m", "agentenv.cli", *arguments],
        env=process_environment(settings.pop("env", {})),
        capture_output=True,
        text=True,
        timeout=settings.pop("timeout", 120),
        check=False,
        **settings,
    )


def process_environment(extra: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{FAKE_SITE}{os.pathsep}{SOURCE}", **extra}


class Screen:
    """`aenv` on a terminal of its own: what a person sees and types."""

    def __init__(self, environment, *arguments, rows=24, columns=80):
        self.leader, follower = os.openpty()
        termios.tcsetwinsize(self.leader, (rows, columns))
        self.before = termios.tcgetattr(follower)
        self.follower = follower
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentenv.cli", *arguments],
            env=process_environment({**environment, "TERM": "xterm"}),
            stdin=follower,
            stdout=follower,
            stderr=follower,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            start_new_session=True,
        )

    def type(self, text):
        os.write(self.leader, text.encode())

    def wait_for(self, pattern, deadline_s=20.0):
        end = time.monotonic() + deadline_s
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < end, f"{pattern!r} did not appear in {self.shown!r}"
            if select.select([self.leader], [], [], 0.1)[0]:
                self.shown += os.read(self.leader, 65536).decode(errors="replace")
        return found

    def resize(self, rows, columns):
        termios.tcsetwinsize(self.leader, (rows, columns))
        os.kill(self.process.pid, signal.SIGWINCH)

    def end(self):
        code = self.process.wait(20)
        restored = termios.tcgetattr(self.follower) == self.before
        while select.select([self.leader], [], [], 0.2)[0]:
            self.shown += os.read(self.leader, 65536).decode(errors="replace")
        return code, restored

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.leader)
        os.close(self.follower)
