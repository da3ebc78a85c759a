"""Nothing of the node grows over cycles of creating, checkpointing, rolling back, forking, pausing and killing real guests.

`AENV_CYCLES=500` for more of them than a quick run has; the table of what was measured is printed (`pytest -s`). The server remembers those
that have ended for `limits.killed_kept_s`: a long run sets that low (`AENV_LIMITS_KILLED_KEPT_S=10`) to see what it keeps beyond that.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from crashes import layer_files
from e2e_node import Node, remains
from guest_programs import PATIENCE_S

from agentenv.client import Sandbox

_CYCLES = int(os.environ.get("AENV_CYCLES", "4"))
_WARM_UP = 3  # what both programs allocate once
_TOLD_EACH = 50  # cycles
#: Whatever the number of cycles: 500 came to 5.7 and 5.3, which both had before the 330th.
_SERVER_MOST_MB, _BLOCKD_MOST_MB = 8.0, 8.0
_DATABASE_MOST_KB = 1024.0


def _cycle(node: Node, number: int) -> None:
    parent = Sandbox.create("base", timeout=900, **node.options)
    made: list[Any] = [parent]
    try:
        parent.files.write("who", f"parent {number}")
        parent.checkpoint("start")
        parent.files.write("who", "wrong turn")
        parent.rollback("start")
        made += parent.fork_many(2, timeout=900)
        assert [one.files.read("who") for one in made] == [f"parent {number}"] * 3
        made[1].pause()
        made[1].connect(timeout=900)
        assert made[1].commands.run("cat who").stdout == f"parent {number}"
    finally:
        for one in made:
            one.kill()


def _status(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    return {
        "memory, MB": int(facts["RssAnon"].split()[0]) / 1024,  # RSS has the page cache of mapped layers, which the kernel takes back
        "open files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(facts["Threads"]),
    }


def _blockd_pid(node: Node) -> int:
    found = subprocess.run(["pgrep", "-f", f"blockd.*{node.run}/blockd.sock"], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) == 1, found
    return int(found[0])


def _lines(*command: str) -> int:
    return len(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines())  # a namespace may just go


def _measured(node: Node) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, pid in (("server", node.server_pid()), ("blockd", _blockd_pid(node))):
        figures |= {f"{name}: {what}": figure for what, figure in _status(pid).items()}
    there = remains(node.home, node.run)
    figures |= {what: len(there.get(what, ())) for what in ("processes", "namespaces", "links", "mounts", "tables")}
    layers = []
    for name in layer_files(node):
        with contextlib.suppress(FileNotFoundError):  # the sweep goes on meanwhile
            layers.append((node.home / "layers" / name).stat())
    figures |= {
        "rules": sum(_lines("ip", "netns", "exec", line.split()[0], "nft", "list", "ruleset") for line in there.get("namespaces", ())),
        "layers": len(layers),
        "layers, MB": sum(layer.st_blocks for layer in layers) / 2048,
        "snapshots": len(list((node.home / "snapshots").iterdir())),
        "stacks": len(list((node.run / "stacks").iterdir())),
        "VM folders": len(list((node.run / "vms").iterdir())),
        "database, KB": sum(path.stat().st_size for path in node.home.glob("node.db")) / 1024,
    }
    return figures


def _at_rest(node: Node, before: dict[str, float]) -> dict[str, float]:
    """Measured once the sweep and the slots have come to rest, or when they should have."""
    end = time.monotonic() + PATIENCE_S
    while True:
        after = _measured(node)
        if not _grown(before, after) or time.monotonic() > end:
            return after
        time.sleep(1)


def _grown(before: dict[str, float], after: dict[str, float]) -> dict[str, tuple[float, float]]:
    """What is more than before by more than its measure swings."""
    swings = {
        "server: memory, MB": _SERVER_MOST_MB,
        "blockd: memory, MB": _BLOCKD_MOST_MB,
        "database, KB": _DATABASE_MOST_KB,
        "server: threads": 8,
        "blockd: threads": 8,
        "server: open files": 4,
        "blockd: open files": 4,
        "layers, MB": 1,
    }
    return {what: (before[what], after[what]) for what in before if after[what] > before[what] + swings.get(what, 0)}


@pytest.mark.timeout(300 + 60 * _CYCLES)
def test_cycles_leave_the_machine_as_it_was(node: Node) -> None:
    for number in range(_WARM_UP):
        _cycle(node, number)
    time.sleep(5)  # sweeps and slots of the last one
    before = _measured(node)
    for number in range(_CYCLES):
        _cycle(node, number)
        if number % _TOLD_EACH == _TOLD_EACH - 1:
            now = _measured(node)
            print(f"after {number + 1}: server {now['server: memory, MB']:.1f} MB, blockd {now['blockd: memory, MB']:.1f} MB", flush=True)
    after = _at_rest(node, before)
    print(f"\n{_CYCLES} cycles of 3 guests      {'before':>10} {'after':>10}")
    for what in before:
        print(f"  {what:<24} {before[what]:>10.1f} {after[what]:>10.1f}")
    assert _grown(before, after) == {}
