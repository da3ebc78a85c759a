"""Figures of a production node, from one run: each against what it is bounded by. Run by `node_check.py` on a node that is up.

    create: `figures_create.py`    disk: `figures_disk.py`
    memory: what a VMM takes beside its guest's memory; what idle sandboxes take in all of what they are configured to have

`figures.py HERE RESULTS [PART...]` prints a table, and writes `figures.json`. Exits with 1 when a bound is not held.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from figure import Figure
from figures_create import create_figures
from figures_disk import disk_figures
from vmms import taken_kib, vmm_pids

from agentenv.config.load import load
from agentenv.core.paths import NodePaths

IDLE_SANDBOXES, IDLE_S = 12, 30


def memory_figures(paths: NodePaths) -> list[Figure]:
    """Idle sandboxes, each of which has run a command; then all are asked for something."""
    from e2b import Sandbox

    sandboxes = [Sandbox.create("base", timeout=3600) for _ in range(IDLE_SANDBOXES)]
    try:
        for sandbox in sandboxes:
            sandbox.commands.run("python3 -c 'print(1)' > /dev/null")
        time.sleep(IDLE_S)
        ids = {sandbox.sandbox_id for sandbox in sandboxes}
        configured_mb = sum(info.memory_mb for page in [Sandbox.list().next_items()] for info in page if info.sandbox_id in ids)
        taken = [taken_kib(pid) for pid in vmm_pids(paths.run)]
        woken = []
        for sandbox in sandboxes:
            began = time.perf_counter()
            sandbox.commands.run("true")
            woken.append(1000 * (time.perf_counter() - began))
    finally:
        for sandbox in sandboxes:
            sandbox.kill()
    resident_mb = sum(whole for _, whole in taken) / 1024
    total_mb = int(Path("/proc/meminfo").read_text().split()[1]) / 1024
    return [
        Figure("memory of a VMM beside its guest's (most of all)", max(beside for beside, _ in taken) / 1024, "MiB", most=8.0),
        Figure(f"idle sandboxes ({IDLE_SANDBOXES}, after a Python each): configured memory", configured_mb, "MiB"),
        Figure("memory of this machine", total_mb, "MiB"),
        Figure("memory they take in all, guests and VMMs", resident_mb, "MiB"),
        Figure("configured of taken", configured_mb / resident_mb, "times", least=10.0),
        Figure("a command in an idle one (median)", statistics.median(woken), "ms"),
        Figure("a command in an idle one (p99)", max(woken), "ms"),
    ]


def main(here: Path, results: Path, wanted: list[str]) -> None:
    """Measure, print, write down; exits with 1 when a bound is not held."""
    config = load()
    paths = NodePaths(config.node.home.absolute(), config.node.run.absolute())
    parts: dict[str, Callable[[], list[Figure]]] = {
        "create": lambda: list(create_figures(here, paths)),
        "disk": lambda: asyncio.run(disk_figures(here, paths)),
        "memory": lambda: memory_figures(paths),
    }
    figures: list[Figure] = []
    for name in wanted or parts:
        found = parts[name]()
        print("\n".join(figure.line() for figure in found), flush=True)
        figures += found
    written = [{"name": f.name, "value": f.value, "unit": f.unit, "most": f.most, "least": f.least, "holds": f.holds} for f in figures]
    (results / "figures.json").write_text(json.dumps(written, indent=2))
    sys.exit(not all(figure.holds for figure in figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
