"""`make bench`: what the product costs beside the limit, both measured in turn in one run; the proxy's part is `proxy.py`,
blockd's is `blocks.py`.

Prints a table and writes `bench.json`. Ratios are what counts: single times are this machine's. `AENV_BENCH_N` sets the
number of samples (default 20).
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import blocks
import bounds
import proxy

from agentenv.client import Checkpoint
from limit import Bare, for_node, restore_and_run
from local_node import node

N = int(os.environ.get("AENV_BENCH_N", "20"))
COMMAND = "echo hello from $(uname -sr)"
DIRTY_MB = (0, 20, 100)
FORK = 3
err = Console(stderr=True)

#: Fills memory that cannot be compressed or shared, and says when it is done.
FILLER = "import os, time; block = os.urandom({mb} << 20); open('/tmp/filled', 'w').close(); time.sleep(3600)"


def ms(work: Callable[[], Any]) -> tuple[float, Any]:
    """Duration in ms and result."""
    began = time.perf_counter()
    result = work()
    return 1000 * (time.perf_counter() - began), result


def summary(samples: list[float]) -> dict[str, float]:
    """Median, 95th percentile, extremes and count."""
    ordered = sorted(samples)
    return {
        "p50_ms": statistics.median(ordered),
        "p95_ms": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "min_ms": ordered[0],
        "max_ms": ordered[-1],
        "n": len(ordered),
    }


def create_and_resume(bare: Bare) -> dict[str, Any]:
    """Create, checkpoint, rollback, snapshot, pause and resume in turn with the bare restore."""
    from agentenv.client import Sandbox

    found: dict[str, list[float]] = {name: [] for name in ("limit", "create", "checkpoint", "rollback", "snapshot", "pause", "resume")}
    for _ in range(N):
        found["limit"].append(restore_and_run(bare, COMMAND))

        def create() -> Sandbox:
            made = Sandbox.create("base", timeout=600)
            made.commands.run(COMMAND)
            return made

        took, sandbox = ms(create)
        found["create"].append(took)
        took, kept = ms(sandbox.checkpoint)
        found["checkpoint"].append(took)

        def back(kept: Checkpoint = kept, sandbox: Sandbox = sandbox) -> None:
            kept.rollback()
            sandbox.commands.run(COMMAND)

        found["rollback"].append(ms(back)[0])
        took, snapshot = ms(sandbox.create_snapshot)
        found["snapshot"].append(took)
        Sandbox.delete_snapshot(snapshot.snapshot_id)
        found["pause"].append(ms(sandbox.pause)[0])
        found["resume"].append(ms(lambda sandbox=sandbox: sandbox.connect(timeout=600).commands.run(COMMAND))[0])
        sandbox.kill()
    return {name: summary(samples) for name, samples in found.items()}


def pause_by_dirtied_memory() -> list[dict[str, float]]:
    """A pause after so much memory was dirtied, beside writing as many bytes to a file."""
    from e2b import Sandbox

    rows = []
    for mb in DIRTY_MB:
        pauses, writes, sizes = [], [], []
        for _ in range(max(3, N // 4)):
            sandbox = Sandbox.create("base", timeout=600)
            if mb:
                sandbox.commands.run(f'python3 -c "{FILLER.format(mb=mb)}"', background=True, timeout=0)
                sandbox.commands.run("while [ ! -e /tmp/filled ]; do sleep 0.1; done", timeout=300)
            pauses.append(ms(sandbox.pause)[0])
            sizes.append(captured_bytes(sandbox.sandbox_id))
            writes.append(ms(lambda size=sizes[-1]: write_file(size))[0])
            sandbox.kill()
        captured_mb = statistics.median(sizes) / 1e6
        rows.append(
            {
                "asked_mb": mb,
                "captured_mb": captured_mb,
                "pause_p50_ms": statistics.median(pauses),
                "allowed_ms": 100 + 1.5 * captured_mb,
                "write_p50_ms": statistics.median(writes),
            }
        )
    return rows


def captured_bytes(sandbox_id: str) -> int:
    """What the node says it captured at the last pause."""
    import urllib.request

    request = urllib.request.Request(
        f"{os.environ['E2B_API_URL']}/sandboxes/{sandbox_id}/logs", headers={"X-API-KEY": os.environ["E2B_API_KEY"]}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return int(re.findall(r'"memory_bytes":\s*"(\d+)"', reply.read().decode().replace("\\", ""))[-1])


def write_file(size: int) -> None:
    """Write `size` bytes beside the node's layers."""
    from agentenv.config.load import load

    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=load().node.home) as out:
        for _ in range(size >> 20):
            out.write(block)
        out.write(block[: size & ((1 << 20) - 1)])


def fork_of_three() -> dict[str, Any]:
    """A fork of three, each answering, beside three creates, each answering."""
    from e2b import Sandbox

    forks, creates = [], []
    for _ in range(max(3, N // 4)):
        source = Sandbox.create("base", timeout=600)
        source.commands.run(COMMAND)

        def fork(source: Sandbox = source) -> list[Any]:
            children = source.fork(count=FORK, timeout=600)
            for child in children:
                child.commands.run(COMMAND)
            return children

        def create() -> list[Any]:
            made = [Sandbox.create("base", timeout=600) for _ in range(FORK)]
            for one in made:
                one.commands.run(COMMAND)
            return made

        took, children = ms(fork)
        forks.append(took)
        took, made = ms(create)
        creates.append(took)
        for one in [source, *children, *made]:
            one.kill()
    return {"fork": summary(forks), "creates": summary(creates)}


def memory_of_idle() -> dict[str, float]:
    """Memory of ten idle sandboxes: what each has for itself, and what they share."""
    from e2b import Sandbox

    from agentenv.config.load import load

    made = [Sandbox.create("base", timeout=600) for _ in range(10)]
    for one in made:
        one.commands.run("true")
    time.sleep(2)
    vms = load().node.run / "vms"
    found = [
        vm_memory(pid) for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()) if _works_in(pid, vms)
    ]
    for one in made:
        one.kill()
    return {key: statistics.mean(sample[key] for sample in found) for key in found[0]} | {"sandboxes": len(found)}


def process_ids() -> list[int]:
    """Every process of the machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").readlink().parent == folder
    except OSError:
        return False


def vm_memory(pid: int) -> dict[str, float]:
    """Of one VMM, MiB: PSS, PSS without the emulator's code cache, and the guest memory it has diverged or shares."""
    totals = {"pss_mb": 0.0, "code_cache_mb": 0.0, "guest_private_mb": 0.0, "guest_shared_mb": 0.0}
    writable_code = guest = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = re.match(r"^[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \d+\s*(.*)$", line)
        if head:
            writable_code, guest = "w" in head[1] and "x" in head[1], "/stacks/mem-" in head[2]
            continue
        name, _, rest = line.partition(":")
        value = rest.split()[0] if rest.split() else ""
        if not value.isdigit():
            continue
        size_mb = int(value) / 1024
        if name == "Pss":
            totals["pss_mb"] += size_mb
            totals["code_cache_mb"] += size_mb * writable_code
        elif guest and name == "Anonymous":
            totals["guest_private_mb"] += size_mb
        elif guest and name in ("Shared_Clean", "Private_Clean"):
            totals["guest_shared_mb"] += size_mb
    return totals | {"pss_without_code_cache_mb": totals["pss_mb"] - totals["code_cache_mb"]}


def report(result: dict[str, Any]) -> bool:
    """Print the tables; True when every stated bound holds."""
    times, forks = result["times"], result["fork_of_three"]
    limit = times["limit"]["p50_ms"]
    held = {
        "create -> first output, ratio to the limit": (times["create"]["p50_ms"] / limit, 1.4),
        "resume -> first output, ratio to the limit": (times["resume"]["p50_ms"] / limit, 1.4),
        "rollback -> first output, ratio to resume": (times["rollback"]["p50_ms"] / times["resume"]["p50_ms"], 1.1),
        "fork of 3, ratio to 3 creates": (forks["fork"]["p50_ms"] / forks["creates"]["p50_ms"], 1.0),
    }
    for row in result["pause"]:
        held[f"pause at {row['captured_mb']:.0f} MB, ratio to 100 ms + 15 ms per 10 MB"] = (row["pause_p50_ms"] / row["allowed_ms"], 1.0)
    out = Console()
    table = Table(title=f"times, n = {times['limit']['n']} in turn")
    for column in ("what", "p50 ms", "p95 ms", "ratio to the limit"):
        table.add_column(column, justify="left" if column == "what" else "right")
    names = {
        "limit": "the limit: bare VMM, first output",
        "create": "create -> first output",
        "resume": "resume -> first output",
        "rollback": "rollback -> first output",
        "checkpoint": "checkpoint",
        "snapshot": "snapshot",
        "pause": "pause",
    }
    for key, name in names.items():
        ratio = "" if key in ("checkpoint", "snapshot", "pause") else f"{times[key]['p50_ms'] / limit:.2f}"
        table.add_row(name, f"{times[key]['p50_ms']:.0f}", f"{times[key]['p95_ms']:.0f}", ratio)
    for key, name in (("fork", f"fork of {FORK}, all answer"), ("creates", f"{FORK} creates, all answer")):
        table.add_row(name, f"{forks[key]['p50_ms']:.0f}", f"{forks[key]['p95_ms']:.0f}", "")
    out.print(table)
    table = Table(title="pause by dirtied memory")
    for column in ("captured MB", "pause p50 ms", "allowed ms", "writing as much to a file, ms"):
        table.add_column(column, justify="right")
    for row in result["pause"]:
        table.add_row(*(f"{row[key]:.0f}" for key in ("captured_mb", "pause_p50_ms", "allowed_ms", "write_p50_ms")))
    out.print(table)
    table = Table(title=f"memory of an idle sandbox, MiB, mean of {result['memory']['sandboxes']:.0f}")
    for column in ("PSS without code cache", "diverged guest memory", "guest memory shared with others", "emulator's code cache"):
        table.add_column(column, justify="right")
    memory = result["memory"]
    table.add_row(*(f"{memory[key]:.0f}" for key in ("pss_without_code_cache_mb", "guest_private_mb", "guest_shared_mb", "code_cache_mb")))
    out.print(table)
    most = {name: (bound, "at most") for name, (_, bound) in held.items()}
    result["bounds"], good = bounds.report(out, "bounds", most, (found for found, _ in held.values()))
    return good


def main() -> None:
    """Measure everything and report. Exits 1 when a bound is broken."""
    from agentenv.config.load import load

    proxy.require_programs()
    with node() as variables:
        os.environ.update(variables)
        err.print("==> make flat files for the bare VMM", highlight=False)
        bare = for_node(load())
        try:
            restore_and_run(bare, COMMAND)  # warms the page cache for both sides
            err.print(f"==> create, pause, resume beside the limit, {N} times", highlight=False)
            times = create_and_resume(bare)
        finally:
            bare.close()
        err.print("==> pause by dirtied memory", highlight=False)
        pause = pause_by_dirtied_memory()
        err.print("==> fork of three beside three creates", highlight=False)
        forks = fork_of_three()
        err.print("==> memory of idle sandboxes", highlight=False)
        memory = memory_of_idle()
        beside = proxy.measure()
    storage = blocks.measure()
    result: dict[str, Any] = {
        "times": times,
        "pause": pause,
        "fork_of_three": forks,
        "memory": memory,
        "proxy": beside,
        "blocks": storage,
    }
    good = report(result)
    good = proxy.report(beside) and good
    good = blocks.report(storage) and good
    Path("bench.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
