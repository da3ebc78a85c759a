"""Whether one more VM may start: by the node's limits and by the memory and disk the host really has left."""

from __future__ import annotations

from pathlib import Path

from agentenv.core.errors import LimitReached
from agentenv.core.lifecycle import CAPTURING, SERVING, State
from agentenv.core.model import Machine
from agentenv.host.files import require_free
from agentenv.orchestrator.parts import Parts

#: States that hold, or are about to hold, a VM.
_HOLDING = SERVING | CAPTURING | {State.CREATING, State.RESUMING, State.ROLLING_BACK}


def available_memory_mb() -> int:
    """MemAvailable of the host, MiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    return 0


def admit(parts: Parts, machine: Machine) -> None:
    """LimitReached or StorageFull, with the figure, unless the node can take one more VM."""
    limits = parts.config.limits
    running = sum(1 for sandbox in parts.store.sandboxes() if sandbox.state in _HOLDING)
    if running >= limits.sandboxes_running:
        raise LimitReached(
            f"{running} sandboxes run here, the node's limit is {limits.sandboxes_running}",
            "kill or pause some, or raise limits.sandboxes_running",
        )
    admit_memory(parts, machine)
    require_free(parts.paths.home, limits.disk_reserve_mb << 20, "another sandbox")


def memory_needed_mb(machine: Machine) -> int:
    """What one VM is counted for: a quarter of its size, since clean pages are shared and an idle guest diverges little."""
    return machine.memory_mb // 4


def admit_memory(parts: Parts, machine: Machine) -> None:
    """LimitReached, with the figure, unless the host has memory for one more VM."""
    needed_mb = parts.config.limits.memory_reserve_mb + memory_needed_mb(machine)
    available_mb = available_memory_mb()
    if available_mb < needed_mb:
        raise LimitReached(f"the host has {available_mb} MiB of memory left, {needed_mb} MiB are needed", "kill or pause sandboxes")
