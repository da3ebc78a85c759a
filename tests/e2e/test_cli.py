"""The command line client against real sandboxes: its terminal, its streams, and what it makes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator

import pytest
from e2e_node import AENV, Node

DEADLINE_S = 120.0


@pytest.fixture
def started(node: Node) -> Iterator[str]:
    """A sandbox that `aenv start` made."""
    sandbox_id = node.aenv("start", "--timeout", "600", "-m", "test=cli").stdout.strip()
    yield sandbox_id
    node.aenv("kill", "--all", "--state", "running,paused", "-m", "test=cli")


class Terminal:
    """`aenv` with a terminal of its own."""

    def __init__(self, node: Node, *arguments: str) -> None:
        self.leader, follower = pty.openpty()
        self.shown = ""
        environment = {**node.environment, "TERM": "xterm"}
        self.process = subprocess.Popen(
            [str(AENV), *arguments], env=environment, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
        )
        os.close(follower)

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < end, f"{pattern!r} did not appear in {self.shown!r}"
            if select.select([self.leader], [], [], 0.1)[0]:
                self.shown += os.read(self.leader, 65536).decode(errors="replace")
        return found

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        os.close(self.leader)
        return code


def run(node: Node, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(AENV), *arguments], env=node.environment, input=stdin, capture_output=True, timeout=DEADLINE_S, check=False)


def test_streams_codes_and_what_goes_on_without_us(node: Node, started: str) -> None:
    payload = os.urandom(1 << 20)
    through = run(node, "sandbox", "exec", started, "cat", stdin=payload)
    assert (through.returncode, through.stdout == payload, through.stderr) == (0, True, b"")
    apart = run(node, "exec", "-e", "A=1", "-c", "/tmp", "-u", "root", started, "sh", "-c", "echo $A $PWD; id -un >&2; exit 7")
    assert (apart.returncode, apart.stdout, apart.stderr) == (7, b"1 /tmp\n", b"root\n")
    pid = int(run(node, "exec", "--background", started, "cat > /tmp/in; exec sleep 600", stdin=b"piped").stdout)
    assert run(node, "exec", "-n", started, f"cat /tmp/in; cat /proc/{pid}/comm").stdout == b"pipedsleep\n"
    assert run(node, "exec", "-n", "--timeout", "2", started, "sleep 600").returncode == 124


def test_create_lives_as_long_as_its_terminal(node: Node) -> None:
    terminal = Terminal(node, "sandbox", "create", "base", "-e", "GREETING=hallo")
    sandbox_id = terminal.wait_for(r"sandbox (i[a-z0-9]{20})")[1]
    terminal.wait_for(r"\$ $")
    terminal.type("echo $GREETING-$((6*7)); exit 3\r")
    terminal.wait_for(r"\rhallo-42")
    assert terminal.end() == 3
    assert node.aenv("info", sandbox_id, check=False).returncode == 3


def test_a_snapshot_is_a_template_until_it_is_deleted(node: Node, started: str) -> None:
    run(node, "exec", "-n", started, "echo kept > /tmp/file")
    made = json.loads(node.aenv("sandbox", "snapshot", "create", started, "--name", "cli-kept", "--json").stdout)
    child = node.aenv("start", "cli-kept", "-m", "test=cli").stdout.strip()
    assert run(node, "exec", "-n", child, "cat /tmp/file").stdout == b"kept\n"
    assert node.aenv("snapshot", "rm", "cli-kept", check=False).returncode == 2
    node.aenv("kill", child)
    assert node.aenv("snapshot", "rm", made["snapshotID"]).stdout.strip() == made["snapshotID"]
    assert made["snapshotID"] not in node.aenv("snapshot", "ls", "--json").stdout


def test_kill_all_that_match(node: Node, started: str) -> None:
    other = node.aenv("start", "-m", "test=cli", "-m", "other=yes").stdout.strip()
    node.aenv("pause", other)
    assert node.aenv("kill", "--all", "-m", "other=yes").stdout == ""
    assert node.aenv("kill", "--all", "-s", "paused", "-m", "other=yes").stdout.strip() == other
    listed = [item["sandboxID"] for item in json.loads(node.aenv("ls", "--all", "-m", "test=cli", "--json").stdout)]
    assert listed == [started]
