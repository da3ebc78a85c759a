"""A node under test: its command line client, its server, and what it leaves on the machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HOME = Path(os.environ.get("AENV_TEST_HOME", "/var/lib/agentenv-test"))
RUN = Path(os.environ.get("AENV_TEST_RUN", "/run/agentenv-test"))
POOL_CIDR = os.environ.get("AENV_TEST_POOL_CIDR", "10.117.0.0/16")
AENV = Path(sys.executable).parent / "aenv"


def busybox() -> Path:
    """All programs that an image needs, in one that is linked statically."""
    found = Path(os.environ.get("AENV_TEST_BUSYBOX", "/usr/bin/busybox"))
    assert found.is_file(), "these tests need busybox-static: `tools/setup.sh tests`"
    return found


@dataclass
class Node:
    """A node and how to talk to it."""

    port: int
    environment: dict[str, str]
    variables: dict[str, str]
    registries: tuple[str, str] = ("", "")  # places of registries without TLS that the node may ask
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

    def records(self, table: str) -> list[dict[str, Any]]:
        """What the node itself has written down, in one of its tables."""
        with contextlib.closing(sqlite3.connect(f"file:{self.home / 'node.db'}?mode=ro", uri=True)) as records:
            return [json.loads(body) for (body,) in records.execute(f"SELECT body FROM {table}")]

    def sandbox_ids(self) -> set[str]:
        return {sandbox["sandbox_id"] for sandbox in self.records("sandboxes")}

    def server_pid(self) -> int:
        return int((self.run / "server.pid").read_text().split()[0])

    def kill_server(self) -> None:
        """As a crash does it."""
        pid = self.server_pid()
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while _is_alive(pid):
            assert time.monotonic() < end, "the server survived SIGKILL"
            time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


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
