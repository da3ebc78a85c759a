"""Memory watch: when the host gets short of memory, who gives way, and in which order.

1. `tight`: VMs that stand ready go (see `warm`), and idle sandboxes give back what the kernel can take (control groups of version 2).
2. `critical`: the sandbox that is idle for longest is paused, one at a time, if its owner and the node allow that. It resumes as any other.
3. `critical`: no sandbox is started (see `admission`): a retryable refusal.

Invariants: a busy sandbox is never touched; one whose owner said no is never paused; what is done is in the sandbox's log. The host's
memory is looked at every few seconds; what the kernel does not tell is in `/health` instead of being taken for plenty.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from typing import Literal

from agentenv.config.memory import MemoryConfig
from agentenv.core.errors import AgentEnvError
from agentenv.core.lifecycle import State
from agentenv.core.model import Machine, RunningVm, Sandbox
from agentenv.host.memory import Memory
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.pause import pause_held
from agentenv.orchestrator.serve_volumes import life

_log = logging.getLogger(__name__)
_INTERVAL_MS = 2_000
_NAME = "memory"
_RECLAIM_BYTES = 64 << 20  # at a time of one sandbox: little enough that it hardly notices if it wakes
_AFTER_PAUSE_MS = 4_000  # for what it freed to show
_MEASURED_AT_ONCE = 4  # a reading takes the kernel milliseconds
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
Level = Literal["plenty", "tight", "critical"]


def level(memory: Memory, settings: MemoryConfig, reserve_mb: int) -> Level:
    """How short of memory the host is. What is not known does not count.

    Tasks also wait for memory where a control group has a limit of its own: that counts only when the host itself has little left.
    """
    available_mb, total_mb = memory.available_mb, memory.total_mb
    has_plenty = available_mb is not None and total_mb is not None and 4 * available_mb > total_mb
    waits = Memory(None, None) if has_plenty else memory
    if _less(available_mb, reserve_mb) or _at_least(waits.full_percent, settings.critical_full_percent):
        return "critical"
    if _less(available_mb, reserve_mb + settings.tight_mb) or _at_least(waits.some_percent, settings.tight_some_percent):
        return "tight"
    return "plenty"


def _less(available_mb: int | None, bound_mb: int) -> bool:
    return available_mb is not None and available_mb < bound_mb


def _at_least(percent: float | None, bound: int) -> bool:
    return percent is not None and percent >= bound


async def run(parts: Parts) -> None:
    """Watch until cancelled."""
    idle = Idleness()
    while True:
        try:
            await _round(parts, idle)
        except Exception as error:  # noqa: BLE001 - a fault met with one sandbox must not end the care for all
            _log.error("looking after the host's memory failed: %s", error, exc_info=not isinstance(error, AgentEnvError))
        await parts.clock.sleep_ms(_INTERVAL_MS)


async def _round(parts: Parts, idle: Idleness) -> None:
    await idle.look(parts)
    await _measure(parts)
    memory = parts.host_memory.now()
    found = level(memory, parts.config.memory, parts.config.limits.memory_reserve_mb)
    _tell(parts, memory, found)
    if found == "plenty":
        return
    parts.shared.warm.changed.set()
    candidates = idle.candidates(parts)
    for sandbox in candidates:
        await _reclaim(parts, sandbox)
    if found == "critical":
        await _pause_first(parts, idle, candidates)


def _tell(parts: Parts, memory: Memory, found: Level) -> None:
    """In `/health`: that memory is short, or that nobody can know."""
    if memory.unknown:
        parts.shared.troubles[_NAME] = f"the kernel does not tell {', '.join(memory.unknown)} of memory: the policy goes by the rest"
    elif found == "critical":
        parts.shared.troubles[_NAME] = f"the host is short of memory ({memory.available_mb} MiB left): no sandbox is started"
    else:
        parts.shared.troubles.pop(_NAME, None)


def _running(parts: Parts) -> dict[str, tuple[RunningVm, Machine]]:
    """Those that run now, by the life of their VM."""
    sandboxes = parts.store.sandboxes()
    return {s.vm.run_id: (s.vm, s.machine) for s in sandboxes if s.state is State.RUNNING and s.vm is not None}


async def _measure(parts: Parts) -> None:
    """Keep what running VMs hold, a few at a time, those first that were not measured yet or longest ago."""
    running = _running(parts)
    held = parts.shared.held_mb
    for run_id in [run_id for run_id in held if run_id not in running]:
        del held[run_id]
    due = [*(run_id for run_id in running if run_id not in held), *held][:_MEASURED_AT_ONCE]
    for run_id in due:
        vm, machine = running[run_id]
        mb = await asyncio.to_thread(parts.host_memory.held_mb, vm.pid)
        held.pop(run_id, None)
        if mb is not None:
            held[run_id] = (machine.memory_mb, mb)


async def _reclaim(parts: Parts, sandbox: Sandbox) -> None:
    if sandbox.vm is not None:
        await asyncio.to_thread(parts.cgroups.reclaim, life(sandbox.sandbox_id, sandbox.vm.run_id), _RECLAIM_BYTES)


async def _pause_first(parts: Parts, idle: Idleness, candidates: list[Sandbox]) -> None:
    """Pause the first that may be, and can be."""
    for sandbox in candidates:
        if not may_pause(sandbox, parts.config.memory.pause_idle) or parts.shared.is_locked(sandbox.sandbox_id):
            continue
        pausing = parts.shared.background(_pause(parts, idle, sandbox.sandbox_id), f"pause idle {sandbox.sandbox_id}")
        if await asyncio.shield(pausing):
            await parts.clock.sleep_ms(_AFTER_PAUSE_MS)
            return


async def _pause(parts: Parts, idle: Idleness, sandbox_id: str) -> bool:
    """Pause one that is still idle when its turn has come; whether it was."""
    async with parts.shared.locked(sandbox_id):
        if not idle.is_idle(parts, sandbox_id):
            return False
        try:
            await pause_held(parts, sandbox_id)
        except AgentEnvError as error:
            await note(parts, sandbox_id, "idle, but could not be paused to free memory", "warn", cause=str(error))
            return False
    await note(parts, sandbox_id, "paused since it was idle and the host is short of memory", "warn")
    return True


def may_pause(sandbox: Sandbox, node_pauses: bool) -> bool:
    """Whether its owner, or else the node, allows it. A build is never idle."""
    allowed = node_pauses if sandbox.pause_when_idle is None else sandbox.pause_when_idle
    return allowed and sandbox.purpose == "sandbox"


@dataclass
class Idleness:
    """Since when each running sandbox has done next to nothing, by the CPU time of its VMM: a kernel at rest uses a little, too."""

    _seen: dict[str, tuple[float, int]] = field(default_factory=dict)  # by life of a VM: when, ticks
    _busy_ms: dict[str, float] = field(default_factory=dict)  # by life of a VM: when it was busy last

    async def look(self, parts: Parts) -> None:
        """Take note of who has used the CPU since the last look."""
        pids = {run_id: vm.pid for run_id, (vm, _) in _running(parts).items()}
        read = parts.host_memory.cpu_ticks
        ticks = await asyncio.to_thread(lambda: {run_id: read(pid) for run_id, pid in pids.items()})  # a file for each thread of each VM
        now_ms, bound = parts.clock.monotonic_ms(), parts.config.memory.idle_cpu_percent
        seen = {run_id: (now_ms, now) for run_id, now in ticks.items() if now is not None}
        for run_id, (_, now) in seen.items():
            before_ms, before = self._seen.get(run_id, (now_ms, now))
            spent_ms = now_ms - before_ms
            percent = 100_000 * (now - before) / _TICKS_PER_S / spent_ms if spent_ms > 0 else 100.0
            if percent >= bound:
                self._busy_ms[run_id] = now_ms
        self._seen = seen
        self._busy_ms = {run_id: at for run_id, at in self._busy_ms.items() if run_id in seen}

    def candidates(self, parts: Parts) -> list[Sandbox]:
        """Those that are idle, for longest first."""
        found = [s for s in parts.store.sandboxes() if self.is_idle(parts, s.sandbox_id)]
        return sorted(found, key=lambda s: self._busy_ms[s.vm.run_id] if s.vm else 0.0)

    def is_idle(self, parts: Parts, sandbox_id: str) -> bool:
        """Whether it runs, and has been idle for as long as the settings say."""
        sandbox = parts.store.sandbox(sandbox_id)
        if sandbox is None or sandbox.state is not State.RUNNING or sandbox.vm is None or sandbox.vm.run_id not in self._busy_ms:
            return False
        return parts.clock.monotonic_ms() - self._busy_ms[sandbox.vm.run_id] >= 1000 * parts.config.memory.idle_s
