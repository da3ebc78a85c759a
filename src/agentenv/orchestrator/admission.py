"""Whether one more VM may start: by the node's limits and by the memory and disk the host really has left.

Memory counts as it is: what the host has available, less what those starting now will take, which is what running VMs of that size hold
(PSS); before there are some, a quarter of the machine's size, since clean pages are shared and a fresh guest diverges little.
"""

from __future__ import annotations

from agentenv.core.errors import LimitReached, ShortOfMemory
from agentenv.core.lifecycle import CAPTURING, SERVING, State
from agentenv.core.model import Machine, Sandbox
from agentenv.host.files import require_free
from agentenv.orchestrator.memory_watch import level
from agentenv.orchestrator.parts import Parts

_STARTING = frozenset({State.CREATING, State.RESUMING, State.ROLLING_BACK})
#: States that hold, or are about to hold, a VM.
_HOLDING = SERVING | CAPTURING | _STARTING
_MEASURED = 3  # VMs of a size that make an estimate
_LEAST_MB = 32


def available_memory_mb(parts: Parts) -> int:
    """What the host has available, MiB; 0 when the kernel does not tell."""
    return parts.host_memory.now().available_mb or 0


def admit(parts: Parts, machine: Machine) -> None:
    """LimitReached, ShortOfMemory or StorageFull, with the figure, unless the node can take one more VM."""
    limits = parts.config.limits
    holding = _holding(parts)
    if len(holding) >= limits.sandboxes_running:
        raise LimitReached(
            f"{len(holding)} sandboxes run here, the node's limit is {limits.sandboxes_running}",
            "kill or pause some, or raise limits.sandboxes_running",
        )
    _admit_overcommit(parts, holding, machine)
    admit_memory(parts, machine)
    require_free(parts.paths.home, limits.disk_reserve_mb << 20, "another sandbox")


def _holding(parts: Parts) -> list[Sandbox]:
    return [sandbox for sandbox in parts.store.sandboxes() if sandbox.state in _HOLDING]


def _admit_overcommit(parts: Parts, holding: list[Sandbox], machine: Machine) -> None:
    percent, total_mb = parts.config.memory.overcommit_percent, parts.host_memory.now().total_mb
    if not percent or total_mb is None:
        return
    promised_mb = sum(sandbox.machine.memory_mb for sandbox in holding)
    if (promised_mb + machine.memory_mb) * 100 > percent * total_mb:
        raise ShortOfMemory(
            f"the machines that run here have {promised_mb} MiB together; with {machine.memory_mb} MiB more it would be over "
            f"{percent} % of the host's {total_mb} MiB",
            "try again later, kill or pause some, or raise memory.overcommit_percent",
        )


def memory_needed_mb(parts: Parts, machine: Machine) -> int:
    """What one more VM of that size is expected to hold."""
    held = [mb for size_mb, mb in parts.shared.held_mb.values() if size_mb == machine.memory_mb]
    if len(held) < _MEASURED:
        return machine.memory_mb // 4
    return max(_LEAST_MB, min(machine.memory_mb, sum(held) // len(held)))


def admit_memory(parts: Parts, machine: Machine) -> None:
    """ShortOfMemory, with the figure, unless the host has memory for one more VM beside those that start now."""
    memory, reserve_mb = parts.host_memory.now(), parts.config.limits.memory_reserve_mb
    starting = [s for s in parts.store.sandboxes() if s.state in _STARTING]
    promised_mb = sum(memory_needed_mb(parts, s.machine) for s in starting)
    needed_mb = reserve_mb + memory_needed_mb(parts, machine) + promised_mb
    if memory.available_mb is not None and memory.available_mb < needed_mb:
        said = f"the host has {memory.available_mb} MiB of memory left, {needed_mb} MiB are needed"
        raise ShortOfMemory(said, "try again later, or kill or pause sandboxes")
    if level(memory, parts.config.memory, reserve_mb) == "critical":
        raise ShortOfMemory(
            f"the host is short of memory: in {memory.full_percent:g} % of the last ten seconds everything waited for some",
            "try again later, or kill or pause sandboxes",
        )
