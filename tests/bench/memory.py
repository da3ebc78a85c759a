"""Guest memory: a pause by how much of it was dirtied, what an idle sandbox holds, and what keeping track of changes costs a guest."""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from samples import DEADLINE_S, N, ms, step
from verbs import captured_bytes, kill, write_file

from agentenv.client import Sandbox
from agentenv.config.load import load

_DIRTY_MB = (0, 20, 100)
_ROUNDS = max(3, min(8, N // 10))
_IDLE = 10
_LOOP_MB = 64

#: Fills memory that cannot be compressed or shared, and says when it is done.
_FILLER = "import os, time; block = os.urandom({mb} << 20); open('/tmp/filled', 'w').close(); time.sleep(3600)"
#: Writes to each of its pages whenever it is told to, and says how long that took.
_WRITER = f"""
import os, time
block = bytearray({_LOOP_MB} << 20)
count = 0
while True:
    began = time.monotonic()
    count += 1
    for at in range(0, len(block), 4096):
        block[at] = count & 255
    with open('/tmp/took.new', 'w') as out:
        out.write(str(1000 * (time.monotonic() - began)))
    os.rename('/tmp/took.new', '/tmp/took')
    while not os.path.exists('/tmp/go'):
        time.sleep(0.01)
    os.remove('/tmp/go')
"""


def measure() -> dict[str, Any]:
    """All of it."""
    return {"pause": pause_by_dirtied_memory(), "tracking": cost_of_tracking(), "idle": memory_of_idle()}


def _shell(sandbox: Sandbox, command: str) -> str:
    return str(sandbox.commands.run(command, timeout=DEADLINE_S, request_timeout=DEADLINE_S).stdout)


def pause_by_dirtied_memory() -> list[dict[str, float]]:
    """A pause after so much memory was dirtied, beside writing as many bytes to a file."""
    step("pause by dirtied memory")
    rows = []
    for mb in _DIRTY_MB:
        pauses, writes, sizes = [], [], []
        for _ in range(_ROUNDS):
            sandbox = Sandbox.create("base", timeout=3600)
            if mb:
                sandbox.commands.run(f'python3 -c "{_FILLER.format(mb=mb)}"', background=True, timeout=0)
                _shell(sandbox, "while [ ! -e /tmp/filled ]; do sleep 0.1; done")
            pauses.append(ms(sandbox.pause)[0])
            sizes.append(captured_bytes(sandbox.sandbox_id)[-1])
            writes.append(ms(lambda size=sizes[-1]: write_file(size))[0])
            kill(sandbox)
        rows.append(
            {
                "asked_mb": mb,
                "captured_mb": statistics.median(sizes) / 1e6,
                "pause_p50_ms": statistics.median(pauses),
                "write_p50_ms": statistics.median(writes),
            }
        )
    return rows


def cost_of_tracking() -> dict[str, float]:
    """What a loop that writes to every page takes in a guest, ms: on pages of its own, after a checkpoint, after a resume."""
    step("a write-heavy loop in a guest, tracked and not")
    found: dict[str, list[float]] = {"own": [], "after_checkpoint": [], "after_resume": []}
    for _ in range(min(5, _ROUNDS)):
        sandbox = Sandbox.create("base", timeout=3600)
        sandbox.files.write("/tmp/writer.py", _WRITER)
        sandbox.commands.run("python3 /tmp/writer.py", background=True, timeout=0)
        _pass(sandbox, go=False)
        _pass(sandbox)  # by now the emulator has translated the loop
        found["own"].append(_pass(sandbox))
        sandbox.checkpoint()
        found["after_checkpoint"].append(_pass(sandbox))
        sandbox.pause()
        sandbox.connect(timeout=3600)
        found["after_resume"].append(_pass(sandbox))
        kill(sandbox)
    return {name: statistics.median(samples) for name, samples in found.items()} | {"mb": _LOOP_MB}


def _pass(sandbox: Sandbox, go: bool = True) -> float:
    start = "touch /tmp/go; " if go else ""
    return float(_shell(sandbox, f"{start}while [ ! -e /tmp/took ]; do sleep 0.05; done; cat /tmp/took; rm /tmp/took"))


def memory_of_idle() -> dict[str, float]:
    """Memory of ten idle sandboxes, mean: what each has for itself, and what they share."""
    step("memory of idle sandboxes")
    made = [Sandbox.create("base", timeout=3600) for _ in range(_IDLE)]
    for one in made:
        _shell(one, "true")
    time.sleep(2)
    vms = load().node.run / "vms"
    found = [
        _vm_memory(pid) for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()) if _works_in(pid, vms)
    ]
    for one in made:
        kill(one)
    return {key: statistics.mean(sample[key] for sample in found) for key in found[0]} | {"sandboxes": len(found)}


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").readlink().parent == folder
    except OSError:
        return False


def _vm_memory(pid: int) -> dict[str, float]:
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


def report(found: dict[str, Any]) -> None:
    """Print the tables of this part."""
    out = Console()
    table = Table(title="pause by dirtied memory")
    for column in ("captured MB", "pause p50 ms", "writing as much to a file, ms"):
        table.add_column(column, justify="right")
    for row in found["pause"]:
        table.add_row(*(f"{row[key]:.0f}" for key in ("captured_mb", "pause_p50_ms", "write_p50_ms")))
    out.print(table)
    tracking = found["tracking"]
    table = Table(title=f"a loop in a guest that writes to each page of {tracking['mb']:.0f} MiB, p50 ms")
    for column in ("on pages of its own", "right after a checkpoint", "right after a resume"):
        table.add_column(column, justify="right")
    table.add_row(*(f"{tracking[key]:.0f}" for key in ("own", "after_checkpoint", "after_resume")))
    out.print(table)
    idle = found["idle"]
    table = Table(title=f"memory of an idle sandbox, MiB, mean of {idle['sandboxes']:.0f}")
    for column in ("PSS without code cache", "diverged guest memory", "guest memory shared with others", "emulator's code cache"):
        table.add_column(column, justify="right")
    table.add_row(*(f"{idle[key]:.0f}" for key in ("pss_without_code_cache_mb", "guest_private_mb", "guest_shared_mb", "code_cache_mb")))
    out.print(table)
