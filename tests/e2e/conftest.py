"""A real node for the tests here: server, blockd, QEMU guests and the official SDK, on this machine.

The node keeps its downloads and its base template in one home between runs (`AENV_TEST_HOME`), so that only the first run
pays for them. A missing prerequisite fails; nothing is skipped. After the last test the machine is searched for remains.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HOME = Path(os.environ.get("AENV_TEST_HOME", "/var/lib/agentenv-test"))
RUN = Path("/run/agentenv-test")
AENV = Path(sys.executable).parent / "aenv"


@dataclass
class Node:
    """A node and how to talk to it."""

    port: int
    environment: dict[str, str]
    variables: dict[str, str]
    home: Path = HOME
    run: Path = RUN

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """Connection options of every SDK call."""
        return {
            "api_key": self.variables["E2B_API_KEY"],
            "api_url": self.variables["E2B_API_URL"],
            "sandbox_url": self.variables["E2B_SANDBOX_URL"],
        }

    def aenv(self, *arguments: str, check: bool = True, timeout: float = 300, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run the command line client."""
        done = subprocess.run(
            [str(AENV), *arguments],
            env=self.environment | more.pop("env", {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **more,
        )
        if check and done.returncode != 0:
            pytest.fail(f"aenv {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def up(self) -> None:
        self.aenv("up", "--detach", "--port", str(self.port), timeout=1200)

    def server_pid(self) -> int:
        return int((self.run / "server.pid").read_text().split()[0])

    def kill_server(self) -> None:
        """As a crash does it."""
        pid = self.server_pid()
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < end, "the server survived SIGKILL"
            time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remains(home: Path = HOME, run: Path = RUN) -> dict[str, Any]:
    """Everything of a node that exists on the machine outside its home."""
    from agentenv.core.paths import NodePaths

    tag = NodePaths(home, run).tag

    def lines(*command: str) -> list[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()

    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run) in command:
            processes.append(f"{entry.name} {command[:100]}")
    found = {
        "processes": processes,
        "namespaces": [line for line in lines("ip", "netns") if f"aenv-{tag}-" in line],
        "links": [line for line in lines("ip", "-o", "link") if f"av{tag}-" in line],
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if str(run) in line],
        "loops": [line for line in lines("losetup", "-a") if str(home) in line],
        "tables": [line for line in lines("nft", "list", "tables") if f"aenv_{tag}" in line],
    }
    return {name: value for name, value in found.items() if value}


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """The node of this run; brought down and searched for remains in the end."""
    assert os.geteuid() == 0, "end-to-end tests need root (namespaces, FUSE, tap devices)"
    port = free_port()
    environment = os.environ | {
        "AENV_NODE_HOME": str(HOME),
        "AENV_NODE_RUN": str(RUN),
        "AENV_NETWORK_POOL_CIDR": "10.117.0.0/16",
        "AENV_LIMITS_LAYERS_IN_CHAIN": "5",  # so that ten cycles meet merged chains, too
        "NO_COLOR": "1",
    }
    subject = Node(port, environment, {})
    subject.aenv("down", "--kill", timeout=300)
    assert remains() == {}, "remains of an earlier run could not be removed"
    subject.up()
    subject.variables = json.loads(subject.aenv("env", "--json").stdout)
    yield subject
    subject.aenv("down", "--kill", timeout=300)
    left = remains()
    assert left == {}, f"left on the machine: {left}"
    kept = HOME / "layers"
    assert kept.is_dir()


@pytest.fixture
def sandbox(node: Node) -> Iterator[Any]:
    """A fresh sandbox, killed in the end."""
    from e2b import Sandbox

    made = Sandbox.create("base", timeout=600, **node.options)
    yield made
    made.kill()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test keeps the server's and blockd's last log lines in its report."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed and report.when == "call":
        for name in ("server.log", "blockd.log"):
            log = HOME / "log" / name
            if log.exists():
                report.sections.append((f"end of {name}", "\n".join(log.read_text(errors="replace").splitlines()[-60:])))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
