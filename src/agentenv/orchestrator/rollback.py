"""Rollback: a sandbox becomes again what it was at one of its checkpoints: same id, address, URL and tokens.

The VM of today is stopped first, so that it does nothing more, and freed only once the one of the checkpoint answers: when
that fails, it goes on. Open connections end. A paused sandbox stays paused, at the checkpoint.
"""

from __future__ import annotations

from agentenv.core import checkpoints
from agentenv.core.errors import AgentEnvError, Conflict
from agentenv.core.lifecycle import State
from agentenv.core.model import Checkpoint, PauseMode, RunningVm, Sandbox
from agentenv.orchestrator.admission import admit_memory
from agentenv.orchestrator.checkpoint import of_sandbox, tree
from agentenv.orchestrator.delete import alive, end
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.pause import live_vm
from agentenv.orchestrator.start import start, stop
from agentenv.orchestrator.sweep import sweep_soon
from agentenv.orchestrator.watch import watch
from agentenv.vmm.driver import Vm

_FREED_AFTER_MS = 500  # the VM of before: what its end takes of the CPUs is not taken from the first command


async def rollback(parts: Parts, sandbox_id: str, reference: str = "") -> Sandbox:
    """Back to the checkpoint of that id or name; by default to the one its present state descends from. Its timeout stays.

    NotFound, Conflict, InvalidInput (it has no checkpoint), LimitReached (no memory for one more VM at the same time), and what
    `start` raises; the sandbox is as before after any failure.
    """
    async with parts.shared.locked(tree(sandbox_id)), parts.shared.locked(sandbox_id):
        sandbox = alive(parts, sandbox_id)
        target = checkpoints.target(of_sandbox(parts, sandbox_id), sandbox, reference)
        with parts.shared.using(target.snapshot_id):
            if sandbox.state is State.PAUSED:
                return await _paused(parts, sandbox, target)
            if sandbox.state is not State.RUNNING or sandbox.vm is None:
                raise Conflict(f"sandbox {sandbox_id} is {sandbox.state}")
            return await _running(parts, sandbox, sandbox.vm, target)


async def _paused(parts: Parts, sandbox: Sandbox, target: Checkpoint) -> Sandbox:
    changes = _at(target.has_memory, target.checkpoint_id)
    changed = await parts.store.change(sandbox.sandbox_id, snapshot_id=target.snapshot_id, **changes)
    sweep_soon(parts)
    await note(parts, sandbox.sandbox_id, "rolled back, stays paused", checkpoint=target.name or target.checkpoint_id)
    return changed


def _at(has_memory: bool, checkpoint_id: str) -> dict[str, object]:
    """What a sandbox that is paused at a checkpoint says of itself."""
    mode: PauseMode = "full" if has_memory else "filesystem"
    return {"pause_mode": mode, "guest_unresponsive": False, "checkpoint_id": checkpoint_id}


async def _running(parts: Parts, sandbox: Sandbox, record: RunningVm, target: Checkpoint) -> Sandbox:
    sandbox_id = sandbox.sandbox_id
    admit_memory(parts, sandbox.machine)
    former = live_vm(parts, sandbox_id)
    began_ms = parts.clock.monotonic_ms()
    snapshot = parts.store.snapshot(target.snapshot_id)
    with parts.layers.announced(*record.layer_ids):
        await parts.store.transition(sandbox_id, State.RUNNING, State.ROLLING_BACK, vm=None, snapshot_id=target.snapshot_id)
        parts.shared.gone(sandbox_id)
        parts.shared.let_go(sandbox_id)
        parts.shared.formers[sandbox_id] = (record, former)
        try:
            await former.pause()
            fresh, vm = await start(parts, sandbox, snapshot, alone=True)
            changes = {"vm": fresh, "snapshot_id": None, "checkpoint_id": target.checkpoint_id}
            running = await parts.store.transition(sandbox_id, State.ROLLING_BACK, State.RUNNING, **changes)
        except BaseException as error:
            await undo(parts, sandbox_id, str(error) if isinstance(error, AgentEnvError) else type(error).__name__)
            raise
    del parts.shared.formers[sandbox_id]
    watch(parts, sandbox_id, vm)
    parts.shared.expiry_changed.set()
    parts.shared.background(_free(parts, sandbox_id, record, former), f"free {sandbox_id}")
    took_ms = parts.clock.monotonic_ms() - began_ms
    await note(parts, sandbox_id, "rolled back", checkpoint=target.name or target.checkpoint_id, took_ms=f"{took_ms:.0f}")
    return running


async def undo(parts: Parts, sandbox_id: str, cause: str) -> None:
    """After a rollback that did not come to its end: what was started is freed, and the VM of before runs again.

    If that one went with the server that stopped it, the sandbox rests at the checkpoint, paused. The caller holds its lock.
    """
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is None or sandbox.state is not State.ROLLING_BACK:
        return
    started, vm = sandbox.vm, parts.shared.vms.get(sandbox_id)
    former = parts.shared.formers.get(sandbox_id)
    if former is None:
        await _rest_at_checkpoint(parts, sandbox)
    else:
        await parts.store.transition(sandbox_id, State.ROLLING_BACK, State.RUNNING, vm=former[0], snapshot_id=None)
        parts.shared.vms[sandbox_id] = parts.shared.formers.pop(sandbox_id)[1]
        await _go_on(parts, sandbox_id, former[1], cause)
    if started is not None:
        await stop(parts, sandbox_id, started, vm)


async def _rest_at_checkpoint(parts: Parts, sandbox: Sandbox) -> None:
    snapshot = parts.store.snapshot(sandbox.snapshot_id or "")
    there = [c.checkpoint_id for c in of_sandbox(parts, sandbox.sandbox_id) if c.snapshot_id == snapshot.snapshot_id]
    changes = _at(snapshot.has_memory, there[-1] if there else sandbox.checkpoint_id)
    await parts.store.transition(sandbox.sandbox_id, State.ROLLING_BACK, State.PAUSED, vm=None, **changes)
    parts.shared.let_go(sandbox.sandbox_id)
    await note(parts, sandbox.sandbox_id, "its rollback was cut short, it rests at the checkpoint", "warn")


async def _go_on(parts: Parts, sandbox_id: str, vm: Vm, cause: str) -> None:
    try:
        await vm.resume()
    except AgentEnvError as lost:
        running = parts.store.sandbox(sandbox_id)
        if running is not None:
            await end(parts, running, f"its VM was lost while it was rolled back ({cause}): {lost}")
        return
    parts.shared.expiry_changed.set()
    await note(parts, sandbox_id, "could not be rolled back, runs on", "error", cause=cause)


async def _free(parts: Parts, sandbox_id: str, record: RunningVm, vm: Vm) -> None:
    await parts.clock.sleep_ms(_FREED_AFTER_MS)
    await stop(parts, sandbox_id, record, vm)
    sweep_soon(parts)
