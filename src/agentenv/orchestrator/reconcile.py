"""Reconcile: after a start of the server, make the records and the machine agree again.

The server may have been killed at any line. VMs whose record names a live process are taken over, with blockd's word on
which layers their disk has; verbs that were under way are finished or undone; what no record explains is removed.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentenv.block.client import Stack
from agentenv.core.errors import AgentEnvError, Conflict
from agentenv.core.lifecycle import CAPTURING, SERVING, State
from agentenv.core.model import RunningVm, Sandbox
from agentenv.core.network import OPEN
from agentenv.host import process
from agentenv.host.process import ProcessId
from agentenv.orchestrator import delete
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.pause import after_failure, thaw
from agentenv.orchestrator.repair import settle
from agentenv.orchestrator.serve_volumes import life
from agentenv.orchestrator.start import cage, vm_spec
from agentenv.orchestrator.sweep import sweep
from agentenv.orchestrator.watch import watch

_KEEPS_VM = SERVING | CAPTURING


async def reconcile(parts: Parts, end_strays: Callable[[Path, set[Path]], object] | None = None) -> None:
    """Run once before the first request is served. `end_strays` stands in for `kill_strays` where VMs are no processes.

    Conflict, with nothing touched, when VMs of another driver run.
    """
    _refuse_other_driver(parts)
    await asyncio.to_thread(parts.cgroups.open)
    stacks = {stack.stack_id: stack for stack in await parts.blocks.stacks()}
    adopted = [s for s in parts.store.sandboxes() if _goes_on(s) and await _adopt(parts, s, stacks)]
    runs = {parts.paths.vm(s.sandbox_id, s.vm.run_id) for s in adopted if s.vm is not None}
    await asyncio.to_thread(end_strays or kill_strays, parts.paths.vms, runs)
    await _close_strays(parts, stacks, adopted)
    lives = {life(s.sandbox_id, s.vm.run_id) for s in adopted if s.vm is not None}
    await parts.volume_servers.adopt(lives)
    await asyncio.to_thread(parts.cgroups.keep_only, lives)
    await parts.slots.open(s.vm.slot for s in adopted if s.vm is not None)
    for sandbox in adopted:  # not before the pool knows their slots: one that has died meanwhile gives its slot back
        await _apply_policy(parts, sandbox)
        watch(parts, sandbox.sandbox_id, parts.shared.vms[sandbox.sandbox_id])
    kept = {s.sandbox_id for s in adopted}
    for sandbox in parts.store.sandboxes():
        if sandbox.sandbox_id not in kept:
            await _finish(parts, sandbox)
    await sweep(parts)


def _refuse_other_driver(parts: Parts) -> None:
    """A VM can be taken over only by the driver that started it."""
    for sandbox in parts.store.sandboxes():
        vm = sandbox.vm
        made = vm.identity if vm is not None else None
        if vm is None or made is None or made.driver == parts.identity.driver:
            continue
        if not process.is_alive(ProcessId(vm.pid, vm.pid_start_ticks)):
            continue
        raise Conflict(
            f"sandbox {sandbox.sandbox_id} runs on {made.driver}, but this node is to run on {parts.identity.driver}",
            f"set vmm.driver to {made.driver}, run `aenv down`, and change it then; sandboxes with memory resume on {made.driver} only",
        )


def _goes_on(sandbox: Sandbox) -> bool:
    """A build is not taken up again: what it has done so far is in its cache."""
    return sandbox.state in _KEEPS_VM and sandbox.purpose == "sandbox"


async def _adopt(parts: Parts, sandbox: Sandbox, stacks: dict[str, Stack]) -> bool:
    """Take over a VM that still runs; False when it, or its disk, is gone."""
    record = sandbox.vm
    if record is None or record.pid == 0 or record.disk_stack not in stacks or record.memory_stack not in stacks:
        return False
    disk = stacks[record.disk_stack]
    try:
        slot = parts.slots.slot(record.slot)
        spec = vm_spec(
            parts, sandbox.sandbox_id, record.run_id, sandbox.machine, stacks[record.memory_stack].path, disk.path, slot, sandbox.quotas
        )
        vm = await parts.vmm.adopt(spec, ProcessId(record.pid, record.pid_start_ticks))
        if sandbox.state is not State.RUNNING:
            await vm.resume()  # it was stopped for a capture that nobody waits for any more
    except AgentEnvError:
        return False
    cage(parts, sandbox.sandbox_id, record.run_id, spec, vm.process)  # an earlier version may not have
    record = _true_record(parts, record, disk)
    if sandbox.state in CAPTURING:
        record = after_failure(record, vm)
    if sandbox.state is State.RUNNING:
        await parts.store.change(sandbox.sandbox_id, vm=record)
    else:
        await parts.store.transition(sandbox.sandbox_id, sandbox.state, State.RUNNING, vm=record)
    parts.shared.vms[sandbox.sandbox_id] = vm
    if sandbox.state in (State.PAUSING, State.SNAPSHOTTING):  # its files may stand still, too
        parts.shared.background(thaw(parts, sandbox.sandbox_id, record), f"thaw {sandbox.sandbox_id}")
    await note(parts, sandbox.sandbox_id, "taken over by a new server", was=sandbox.state)
    return True


async def _apply_policy(parts: Parts, sandbox: Sandbox) -> None:
    """The server may have been killed between the record of a policy and the slot's change."""
    egress = sandbox.egress
    if sandbox.vm is None or egress == OPEN:
        return
    try:
        await parts.slots.apply(sandbox.vm.slot, egress)
    except AgentEnvError as error:
        await note(parts, sandbox.sandbox_id, "its network policy could not be applied again", "error", cause=str(error))


def _true_record(parts: Parts, record: RunningVm, disk: Stack) -> RunningVm:
    """The record with the upper blockd really writes: the recorded one may have been sealed just before the crash."""
    upper = record.upper_layer if disk.upper is None else parts.layers.id_of(disk.upper)
    if upper == record.upper_layer:
        return record
    return replace(record, disk_layers=(*record.disk_layers, record.upper_layer), upper_layer=upper)


async def _finish(parts: Parts, sandbox: Sandbox) -> None:
    """Bring a sandbox without a VM to a state it can rest in."""
    if sandbox.state is State.CREATING:
        await delete.end(parts, sandbox, "the server stopped while it was being created")
    elif sandbox.purpose == "build" and sandbox.state is not State.KILLED:
        await delete.end(parts, sandbox, "the server stopped while the build was under way")
    elif sandbox.state in _KEEPS_VM:
        await delete.end(parts, sandbox, "its VM or its disk was lost while the server was down")
    else:
        await settle(parts, sandbox.sandbox_id, "the server stopped while it was being ended")


async def _close_strays(parts: Parts, stacks: dict[str, Stack], adopted: list[Sandbox]) -> None:
    kept = {s.vm.disk_stack for s in adopted if s.vm is not None} | {s.vm.memory_stack for s in adopted if s.vm is not None}
    for stack_id in stacks:
        if stack_id not in kept:
            await parts.blocks.close_stack(stack_id, force=True)


def kill_strays(vms: Path, kept: set[Path]) -> int:
    """End VMMs and remove work folders that no record explains; returns how many VMMs there were. Blocks."""
    strays = {folder: pid for folder, pid in process.working_below(vms).items() if folder not in kept}
    for pid in strays.values():
        process.kill(pid)
    for folder in vms.iterdir() if vms.is_dir() else ():
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
    return len(strays)
