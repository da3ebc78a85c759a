"""Resume and connect: bring a paused sandbox back under the same id and token; connect also extends a running one."""

from __future__ import annotations

from agentenv.core.errors import Conflict
from agentenv.core.lifecycle import State
from agentenv.core.model import Sandbox
from agentenv.orchestrator.admission import admit
from agentenv.orchestrator.compact import compact_if_endless
from agentenv.orchestrator.delete import missing
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.start import start, stop
from agentenv.orchestrator.sweep import sweep_soon
from agentenv.orchestrator.watch import watch


async def connect(parts: Parts, sandbox_id: str, timeout_s: int) -> tuple[Sandbox, bool]:
    """Make it run, for at least `timeout_s` from now. True when it had to be resumed. Never shortens."""
    await compact_if_endless(parts, sandbox_id)
    async with parts.shared.locked(sandbox_id):
        sandbox = parts.store.sandbox(sandbox_id)
        if sandbox is None or sandbox.state in (State.KILLING, State.KILLED):
            raise missing(sandbox_id)
        if sandbox.state is State.PAUSED:
            return await _resume(parts, sandbox, timeout_s), True
        if sandbox.state is not State.RUNNING:
            raise Conflict(f"sandbox {sandbox_id} is {sandbox.state}")
        end_at_ms = max(sandbox.end_at_ms, parts.clock.now_ms() + 1000 * timeout_s)
        extended = await parts.store.change(sandbox_id, end_at_ms=end_at_ms)
    parts.shared.expiry_changed.set()
    return extended, False


async def resume(parts: Parts, sandbox_id: str, timeout_s: int) -> Sandbox:
    """Resume a paused sandbox. Conflict when it runs."""
    await compact_if_endless(parts, sandbox_id)
    async with parts.shared.locked(sandbox_id):
        sandbox = parts.store.sandbox(sandbox_id)
        if sandbox is None or sandbox.state in (State.KILLING, State.KILLED):
            raise missing(sandbox_id)
        if sandbox.state is not State.PAUSED:
            raise Conflict(f"sandbox {sandbox_id} is {sandbox.state} already")
        return await _resume(parts, sandbox, timeout_s)


async def _resume(parts: Parts, sandbox: Sandbox, timeout_s: int) -> Sandbox:
    sandbox_id = sandbox.sandbox_id
    snapshot = parts.store.snapshot(sandbox.snapshot_id or "")
    admit(parts, sandbox.machine)
    await parts.store.transition(sandbox_id, State.PAUSED, State.RESUMING)
    began_ms = parts.clock.monotonic_ms()
    try:
        record, vm = await start(parts, sandbox, snapshot)
        end_at_ms = parts.clock.now_ms() + 1000 * timeout_s
        running = await parts.store.transition(sandbox_id, State.RESUMING, State.RUNNING, vm=record, snapshot_id=None, end_at_ms=end_at_ms)
    except BaseException:
        await back_to_paused(parts, sandbox_id)
        raise
    watch(parts, sandbox_id, vm)
    parts.shared.expiry_changed.set()
    sweep_soon(parts)
    took_ms = parts.clock.monotonic_ms() - began_ms
    await note(parts, sandbox_id, "resumed", took_ms=f"{took_ms:.0f}")
    return running


async def back_to_paused(parts: Parts, sandbox_id: str) -> None:
    """After a resume that did not come to its end: the snapshot is untouched, what was started is freed."""
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is None or sandbox.state is not State.RESUMING:
        return
    await parts.store.transition(sandbox_id, State.RESUMING, State.PAUSED, vm=None)
    if sandbox.vm is not None:
        await stop(parts, sandbox_id, sandbox.vm, parts.shared.let_go(sandbox_id))
