"""Resume and connect: bring a paused sandbox back under the same id and token; connect also extends a running one.

A sandbox whose pause kept its memory goes on where it was, unless the caller asks for a boot from its disk.
"""

from __future__ import annotations

from agentenv.core.errors import Conflict, GuestUnresponsive
from agentenv.core.lifecycle import State
from agentenv.core.model import OnTimeout, Sandbox
from agentenv.orchestrator.admission import admit
from agentenv.orchestrator.collect import make_room
from agentenv.orchestrator.compact import compact_if_endless
from agentenv.orchestrator.delete import alive
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.start import start, stop
from agentenv.orchestrator.sweep import sweep_soon
from agentenv.orchestrator.watch import watch


async def connect(parts: Parts, sandbox_id: str, timeout_s: int, memory: bool = True) -> tuple[Sandbox, bool]:
    """Make it run, for at least `timeout_s` from now. True when it had to be resumed. Never shortens.

    `memory` false boots a paused one from its disk and changes nothing for one that runs.
    """
    await compact_if_endless(parts, sandbox_id)
    async with parts.shared.locked(sandbox_id):
        sandbox = alive(parts, sandbox_id)
        if sandbox.state is State.PAUSED:
            return await _resume(parts, sandbox, timeout_s, memory, sandbox.on_timeout), True
        if sandbox.state is not State.RUNNING:
            raise Conflict(f"sandbox {sandbox_id} is {sandbox.state}")
        end_at_ms = max(sandbox.end_at_ms, parts.clock.now_ms() + 1000 * timeout_s)
        extended = await parts.store.change(sandbox_id, end_at_ms=end_at_ms)
    parts.shared.expiry_changed.set()
    return extended, False


async def wake(parts: Parts, sandbox_id: str, timeout_s: int) -> Sandbox | None:
    """What traffic does (contract section 2.4): resume a paused sandbox whose policy says so; None when it must stay asleep.

    Decided under the lock: of many who ask at once the first resumes it, and the others find it running. One that runs is
    not extended, one whose pause kept its disk alone is never woken.
    """
    await compact_if_endless(parts, sandbox_id)
    async with parts.shared.locked(sandbox_id):
        sandbox = alive(parts, sandbox_id)
        if sandbox.state is State.RUNNING:
            return sandbox
        asleep = sandbox.pause_mode == "filesystem" or sandbox.guest_unresponsive
        if sandbox.state is not State.PAUSED or not sandbox.auto_resume or asleep:
            return None
        return await _resume(parts, sandbox, timeout_s, True, sandbox.on_timeout)


async def resume(parts: Parts, sandbox_id: str, timeout_s: int, memory: bool = True, on_timeout: OnTimeout | None = None) -> Sandbox:
    """Resume a paused sandbox, with a new policy at its timeout if one is given. Conflict when it runs."""
    await compact_if_endless(parts, sandbox_id)
    async with parts.shared.locked(sandbox_id):
        sandbox = alive(parts, sandbox_id)
        if sandbox.state is not State.PAUSED:
            raise Conflict(f"sandbox {sandbox_id} is {sandbox.state} already")
        return await _resume(parts, sandbox, timeout_s, memory, on_timeout or sandbox.on_timeout)


async def _resume(parts: Parts, sandbox: Sandbox, timeout_s: int, memory: bool, on_timeout: OnTimeout) -> Sandbox:
    sandbox_id = sandbox.sandbox_id
    if memory:
        refuse_unresponsive(sandbox)
    await make_room(parts)
    snapshot = parts.store.snapshot(sandbox.snapshot_id or "")
    admit(parts, sandbox.machine)
    await parts.store.transition(sandbox_id, State.PAUSED, State.RESUMING)
    began_ms = parts.clock.monotonic_ms()
    try:
        record, vm = await start(parts, sandbox, snapshot, cold=not memory, alone=True)
        end_at_ms = parts.clock.now_ms() + 1000 * timeout_s
        changes = {"vm": record, "snapshot_id": None, "end_at_ms": end_at_ms, "on_timeout": on_timeout, "guest_unresponsive": False}
        running = await parts.store.transition(sandbox_id, State.RESUMING, State.RUNNING, **changes)
    except BaseException:
        await back_to_paused(parts, sandbox_id)
        raise
    watch(parts, sandbox_id, vm)
    parts.shared.expiry_changed.set()
    sweep_soon(parts)
    took_ms = parts.clock.monotonic_ms() - began_ms
    how = "memory" if record.memory_layers else "boot"
    await note(parts, sandbox_id, "resumed", by=how, took_ms=f"{took_ms:.0f}")
    return running


def refuse_unresponsive(sandbox: Sandbox) -> None:
    """GuestUnresponsive when the memory of a paused sandbox is of no use (contract section 2.1)."""
    if sandbox.guest_unresponsive:
        raise GuestUnresponsive(
            f"the guest of sandbox {sandbox.sandbox_id} did not answer when it was paused; its memory would bring that back",
            "resume it with memory false (on_resume reboot): it boots from its disk",
        )


async def back_to_paused(parts: Parts, sandbox_id: str) -> None:
    """After a resume that did not come to its end: the snapshot is untouched, what was started is freed."""
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is None or sandbox.state is not State.RESUMING:
        return
    await parts.store.transition(sandbox_id, State.RESUMING, State.PAUSED, vm=None)
    if sandbox.vm is not None:
        await stop(parts, sandbox_id, sandbox.vm, parts.shared.let_go(sandbox_id))
