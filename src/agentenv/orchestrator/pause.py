"""Pause: capture a running sandbox, or its disk alone, and free its VM. If anything fails before the record, it runs on as before.

The guest's agent is asked first whether it answers, unless it has just answered somebody: memory in which it hangs would hang
after every restore. For the disk alone the guest freezes its root file system, so that the disk mounts clean and holds everything
written until then.
"""

from __future__ import annotations

import math
from dataclasses import replace

from agentenv.core.errors import AgentEnvError, Conflict, NotFound, Unavailable
from agentenv.core.ids import new_snapshot_id
from agentenv.core.lifecycle import CAPTURING, State
from agentenv.core.model import PauseMode, RunningVm, Sandbox, Snapshot
from agentenv.core.spans import span
from agentenv.host.files import require_free
from agentenv.orchestrator.collect import make_room
from agentenv.orchestrator.compact import compact
from agentenv.orchestrator.delete import alive, end
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.start import stop
from agentenv.orchestrator.sweep import sweep_soon
from agentenv.snapshot.capture import Captured, CapturePlan
from agentenv.vmm.driver import Vm

_THAW_DEADLINE_S = 10.0
_HEARD_MS = 1000  # an answer of the guest's agent stands for so long


async def pause(parts: Parts, sandbox_id: str, memory: bool = True, require_healthy_guest: bool = False) -> None:
    """Answers once the snapshot is recorded; the VM's remains are freed after that.

    Conflict when already paused. Unavailable when the guest does not answer and must: for a pause of the disk alone, or if asked for.
    """
    async with parts.shared.locked(sandbox_id):
        await pause_held(parts, sandbox_id, memory, require_healthy_guest)


async def pause_held(parts: Parts, sandbox_id: str, memory: bool = True, require_healthy_guest: bool = False) -> None:
    """`pause` for a caller that holds the sandbox's lock."""
    sandbox = alive(parts, sandbox_id)
    if sandbox.state is not State.RUNNING or sandbox.vm is None:
        raise Conflict(f"sandbox {sandbox_id} is {sandbox.state} already")
    await make_room(parts)
    require_free(parts.paths.home, parts.config.limits.disk_reserve_mb << 20, "a pause")
    began_ms = parts.clock.monotonic_ms()
    with span("guest"):
        answers = await _answers(parts, sandbox_id, sandbox.vm, require_healthy_guest)
    if not answers and (require_healthy_guest or not memory):
        raise Unavailable(
            f"the guest of sandbox {sandbox_id} did not answer within {parts.config.guest.answer_deadline_s} s; it runs on",
            "try again later, or pause it with its memory and without requireHealthyGuest",
        )
    await parts.store.transition(sandbox_id, State.RUNNING, State.PAUSING)
    await _pause(parts, sandbox, sandbox.vm, memory, not answers, began_ms)


async def _answers(parts: Parts, sandbox_id: str, record: RunningVm, ask: bool) -> bool:
    vm = live_vm(parts, sandbox_id)
    if await vm.stalled():  # by a full disk, which has room now: not the guest's fault
        await vm.resume()
    elif not ask and parts.clock.monotonic_ms() - parts.shared.heard_ms.get(sandbox_id, -math.inf) < _HEARD_MS:
        return True
    return await parts.guest.answers(_namespace(parts, record), parts.config.guest.answer_deadline_s)


async def _pause(parts: Parts, sandbox: Sandbox, record: RunningVm, memory: bool, unresponsive: bool, began_ms: float) -> None:
    sandbox_id = sandbox.sandbox_id
    mode: PauseMode = "full" if memory else "filesystem"
    parts.shared.gone(sandbox_id)
    plan = plan_capture(parts)
    with parts.layers.announced(plan.memory_layer, plan.fresh_upper), parts.shared.using(plan.snapshot_id):
        try:
            captured = await take(parts, sandbox, record, plan, memory)
            record = captured.vm
            await parts.store.add_snapshot(captured.snapshot)
            changes = {"snapshot_id": plan.snapshot_id, "vm": None, "pause_mode": mode, "guest_unresponsive": unresponsive}
            await parts.store.transition(sandbox_id, State.PAUSING, State.PAUSED, **changes)
        except BaseException as error:
            cause = str(error) if isinstance(error, AgentEnvError) else type(error).__name__
            await run_on(parts, sandbox_id, record, cause)
            raise
    took_ms = parts.clock.monotonic_ms() - began_ms
    vm = parts.shared.let_go(sandbox_id)
    parts.shared.background(_free(parts, sandbox_id, record, vm, captured.snapshot), f"free {sandbox_id}")
    await note(parts, sandbox_id, "paused", mode=mode, took_ms=f"{took_ms:.0f}", memory_bytes=str(captured.memory_bytes))
    if unresponsive:
        await note(parts, sandbox_id, "its guest did not answer when it was paused: resume it with memory false", "warn")


def plan_capture(parts: Parts) -> CapturePlan:
    """Names for one capture."""
    return CapturePlan(new_snapshot_id(), parts.layers.new_id(), parts.layers.new_id())


async def take(parts: Parts, sandbox: Sandbox, record: RunningVm, plan: CapturePlan, memory: bool = True) -> Captured:
    """Stop and capture the VM, or its disk alone. From then on its disk goes on as `Captured.vm` says, which the caller records.

    Without memory the guest's root file system is left frozen: it is the caller's to `thaw` if the VM goes on, also after a failure.
    """
    vm = live_vm(parts, sandbox.sandbox_id)
    if not memory:
        await parts.guest.freeze(_namespace(parts, record), parts.config.guest.freeze_deadline_s)
    try:
        return await parts.capturer.capture(plan, vm, record, sandbox.machine, record.identity or parts.identity, memory)
    except NotFound as error:  # of a disk or memory: not of the sandbox, which is what a caller would understand
        raise Unavailable(
            f"the disk or memory of sandbox {sandbox.sandbox_id} was lost with the block server: {error.message}",
            "try again in a moment: by then the sandbox is paused with what could be saved, or its log says why it ended",
        ) from error


async def thaw(parts: Parts, sandbox_id: str, record: RunningVm) -> None:
    """Let a guest that was frozen for a capture, and runs again, change its files. A failure is noted: the guest thaws by itself later."""
    try:
        await parts.guest.thaw(_namespace(parts, record), _THAW_DEADLINE_S)
    except AgentEnvError as error:
        await note(parts, sandbox_id, "its files may stand still for half a minute", "warn", cause=str(error))


def _namespace(parts: Parts, record: RunningVm) -> str:
    return parts.slots.slot(record.slot).namespace


def live_vm(parts: Parts, sandbox_id: str) -> Vm:
    """The handle of a running sandbox's VM. Conflict when it just ended."""
    vm = parts.shared.vms.get(sandbox_id)
    if vm is None:
        raise Conflict(f"sandbox {sandbox_id} has just ended")
    return vm


def after_failure(record: RunningVm, vm: Vm) -> RunningVm:
    """The record of a VM after a capture that may have taken pages which no layer of its has."""
    return record if vm.writer is None else replace(record, needs_whole_memory=True)


async def run_on(parts: Parts, sandbox_id: str, record: RunningVm, cause: str = "") -> None:
    """After a capture, or an attempt at one: the VM runs on with its disk as in `record`; if it is lost, the sandbox ends.

    `cause` says what failed. When the record cannot be written the VM runs on all the same, and `repair` writes it later.
    """
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is None or sandbox.state not in CAPTURING:
        return
    try:
        vm = live_vm(parts, sandbox_id)
        await vm.resume()  # harmless when it runs already
        record = after_failure(record, vm) if cause else record
    except AgentEnvError as lost:
        await end(parts, sandbox, f"its VM was lost while it was captured ({cause or 'the capture itself worked'}): {lost}")
        return
    if sandbox.state is State.PAUSING or (cause and sandbox.state is State.SNAPSHOTTING):  # its disk alone may have been wanted
        await thaw(parts, sandbox_id, record)
    await parts.store.transition(sandbox_id, sandbox.state, State.RUNNING, vm=record)
    parts.shared.expiry_changed.set()
    if cause:
        await note(parts, sandbox_id, "could not be captured, runs on", "error", cause=cause)


async def _free(parts: Parts, sandbox_id: str, record: RunningVm, vm: Vm | None, snapshot: Snapshot) -> None:
    await stop(parts, sandbox_id, record, vm)
    await compact(parts, sandbox_id, snapshot)
    sweep_soon(parts)
