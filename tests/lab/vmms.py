"""The VMMs of a node, and what they take of their host."""

from __future__ import annotations

import os
import re
from pathlib import Path

from agentenv.host import process


def vmm_pids(run: Path) -> list[int]:
    """The VMMs of the node."""
    return [found.pid for found in process.working_below(run / "vms").values()]


def taken_kib(pid: int) -> tuple[int, int]:
    """What a VMM takes beside its guest's memory, and in all: PSS, which counts what is shared once in all, and its jail's files.

    The kernel's own (page tables, what KVM keeps of a VM) is not in it.
    """
    jail = os.statvfs(f"/proc/{pid}/root")
    beside = whole = (jail.f_blocks - jail.f_bfree) * jail.f_frsize >> 10  # its file system is in memory
    mapped = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapped = line.split()[5] if len(line.split()) > 5 else ""
        elif line.startswith("Pss:") and mapped != "/firecracker":  # which is in its jail
            kib = int(line.split()[1])
            whole += kib
            beside += 0 if mapped == "/memory" else kib
    return beside, whole


def cpu_ticks(pid: int) -> int:
    """The CPU time of a process so far; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
