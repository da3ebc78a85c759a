"""The one way to a running VM: `start(snapshot) -> running VM`. Create, resume and fork children all come here.

A snapshot with memory is restored; one without is booted from its disk, and so is any other when asked for. A boot takes
only the disk from the snapshot: it needs no VMM, kernel or host like the one the snapshot was made with.

The plan (slot, stacks, layer names) is recorded before anything is acquired and the process right after its start, so a
crash at any line leaves either nothing or something the next start finds by its record or its name.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from agentenv.block.client import Stack
from agentenv.core.cleanup import Cleanup
from agentenv.core.errors import AgentEnvError
from agentenv.core.ids import new_run_id
from agentenv.core.model import Machine, RunningVm, Sandbox, Snapshot
from agentenv.core.network import OPEN
from agentenv.core.quotas import NONE, Quotas, capped
from agentenv.core.spans import span
from agentenv.core.tasks import unless
from agentenv.guest.client import GuestIdentity
from agentenv.host.cgroup import Share
from agentenv.host.process import ProcessId
from agentenv.network.layout import GUEST_MAC, TAP, Slot
from agentenv.orchestrator import disk_growth
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.serve_volumes import life, serve
from agentenv.orchestrator.start_errors import block_server_may_end, lost_at_start
from agentenv.orchestrator.template_service import start_again
from agentenv.orchestrator.warm_pool import WarmVm
from agentenv.snapshot.capture import state_file
from agentenv.snapshot.intact import require_intact
from agentenv.vmm.driver import Vm, VmSpec
from agentenv.vmm.identity import refuse_mismatch

_log = logging.getLogger(__name__)
_KILL_GRACE_S = 1.0  # a VMM that nothing holds ends in milliseconds


def memory_stack_id(layers: Iterable[str]) -> str:
    """One shared device per list of memory layers, so that all VMs of a snapshot share its page cache."""
    return "mem-" + hashlib.sha256(",".join(layers).encode()).hexdigest()[:32]


def vm_spec(
    parts: Parts, sandbox_id: str, run_id: str, machine: Machine, memory: Path, disk: Path, slot: Slot, asked: Quotas = NONE
) -> VmSpec:
    """What the driver needs to know of one life of a VM, for which `asked` was asked for."""
    work, quotas = parts.paths.vm(sandbox_id, run_id), capped(asked, parts.config.limits.quotas)
    return VmSpec(f"aenv-{sandbox_id}", work, machine, memory, disk, slot.namespace, TAP, GUEST_MAC, quotas)


def blank_memory_id(memory_mb: int) -> str:
    """The shared device that guests of that size boot on."""
    return f"mem-blank-{memory_mb}"


def plan(parts: Parts, snapshot: Snapshot, slot: int, *, cold: bool, alone: bool = False, grown_disk_mb: int = 0) -> RunningVm:
    """Every name that a VM started from a snapshot will use, before anything but its slot is acquired.

    `alone`: no other will start from that snapshot.
    """
    upper = parts.layers.new_id()
    memory = () if cold else mapped_layers(parts, snapshot) if alone else snapshot.memory_layers
    return RunningVm(
        run_id=new_run_id(),
        slot=slot,
        memory_stack=blank_memory_id(snapshot.machine.memory_mb) if cold else memory_stack_id(memory),
        disk_stack=f"disk-{upper}",
        memory_layers=memory,
        disk_layers=snapshot.disk_layers,
        upper_layer=upper,
        identity=parts.identity if cold else snapshot.identity,
        grown_disk_mb=grown_disk_mb,
    )


def mapped_layers(parts: Parts, snapshot: Snapshot) -> tuple[str, ...]:
    """The layers of memory that a VM maps which starts alone from a snapshot: all, or all but the newest, which is copied then.

    Copied, because a device of all layers is read by nobody else and has nothing in the page cache, while that of the layers below
    is most often a template's, whose pages all its VMs share. Large ones are read as the guest needs them.
    """
    *below, own = snapshot.memory_layers
    if not below or not (parts.vmm.fills_memory and parts.blocks.fills_memory):
        return snapshot.memory_layers
    is_small = parts.layers.path(own).stat().st_size <= parts.config.vmm.own_memory_copied_mb << 20
    return tuple(below) if is_small else snapshot.memory_layers


async def require_usable(parts: Parts, snapshot: Snapshot, *, cold: bool) -> None:
    """SnapshotOfAnotherHost or DataCorrupt, before anything is acquired, when a snapshot cannot be started here, or not any more."""
    if not cold:
        refuse_mismatch(snapshot.identity, parts.identity)
    with span("check"):
        await asyncio.to_thread(require_intact, snapshot, parts.layers, parts.paths, disk_alone=cold)


async def launch_vm(
    parts: Parts, sandbox_id: str, record: RunningVm, snapshot: Snapshot, slot: Slot, *, cold: bool = False, asked: Quotas = NONE
) -> tuple[RunningVm, Vm]:
    """Open the stacks of `record` and start its VMM; the record with its process. What exists after a failure is for `stop`."""
    machine = disk_growth.machine_of(record, snapshot)
    with span("stacks"):
        memory, disk = await _open_stacks(parts, record, machine, slot)
    spec = vm_spec(parts, sandbox_id, record.run_id, machine, memory, disk, slot, asked)
    if cold:
        vm = await parts.vmm.boot(spec, parts.boot)
    else:
        own = parts.layers.paths(snapshot.memory_layers[len(record.memory_layers) :])

        async def fill(process: ProcessId) -> None:
            cage(parts, sandbox_id, record.run_id, spec, process)  # what is filled in counts for it
            await parts.blocks.fill(process.pid, record.memory_stack, own)

        vm = await parts.vmm.restore(spec, state_file(parts.paths, snapshot.snapshot_id), fill if own else None)
    cage(parts, sandbox_id, record.run_id, spec, vm.process)
    return replace(record, pid=vm.process.pid, pid_start_ticks=vm.process.start_ticks), vm


def cage(parts: Parts, sandbox_id: str, run_id: str, spec: VmSpec, process: ProcessId) -> None:
    """Put a VM into a control group of its own, with its share of the host."""
    memory_mb = spec.machine.memory_mb + parts.vmm.code_cache_mb + parts.config.limits.vmm_overhead_mb
    parts.cgroups.put(life(sandbox_id, run_id), process.pid, Share(memory_mb, spec.quotas, spec.machine.vcpu_count))


async def start(
    parts: Parts,
    sandbox: Sandbox,
    snapshot: Snapshot,
    *,
    cold: bool = False,
    alone: bool = False,
    clock_behind_ms: int = 0,
    warm: WarmVm | None = None,
) -> tuple[RunningVm, Vm]:
    """Start `snapshot` as `sandbox` and return once its guest has its identity. `cold` boots it even if there is memory.

    `alone`: nobody else will start from that snapshot (`mapped_layers`). `clock_behind_ms` sets the guest's clock that much before ours,
    for guests that become templates. `warm` is a VM of the snapshot that stands ready for this sandbox, and is woken. What is acquired is
    on the sandbox's record (`vm`) and in `shared.vms`, from the first moment on and also after a failure: whoever takes it off the
    record frees it with `stop`, and nobody else does.
    """
    cold = cold or not snapshot.has_memory
    await require_usable(parts, snapshot, cold=cold)
    layers = (*snapshot.memory_layers, *snapshot.disk_layers)
    with parts.layers.announced(*layers):  # until they are on record: a merge may take them out of the snapshot meanwhile
        with span("queue"):
            await parts.shared.starting.acquire()
        try:
            if warm is not None and (woken := await _wake(parts, sandbox, warm)) is not None:
                return woken
            with block_server_may_end(parts):
                return await _start(parts, sandbox, snapshot, cold, alone, clock_behind_ms)
        finally:
            parts.shared.starting.release()


async def _wake(parts: Parts, sandbox: Sandbox, warm: WarmVm) -> tuple[RunningVm, Vm] | None:
    """Let a warm VM become the sandbox. None when it is of no use, and freed."""
    sandbox_id, record = sandbox.sandbox_id, warm.record
    await parts.store.change(sandbox_id, vm=record)
    parts.shared.vms[sandbox_id] = warm.vm
    parts.shared.warm.handed_over(sandbox_id)
    try:
        if sandbox.egress != OPEN:
            await parts.slots.apply(record.slot, sandbox.egress)
        with span("wake"):
            await warm.vm.resume()
        slot = parts.slots.slot(record.slot)
        await _introduce(parts, sandbox, slot, warm.vm, (), parts.config.guest.restore_deadline_s, False, 0)
    except AgentEnvError as error:
        _log.warning("the VM that stood ready for %s is of no use, another one is started: %s", sandbox_id, error)
        await parts.store.change(sandbox_id, vm=None)
        await stop(parts, sandbox_id, record, parts.shared.let_go(sandbox_id))
        return None
    return record, warm.vm


async def _start(parts: Parts, sandbox: Sandbox, snapshot: Snapshot, cold: bool, alone: bool, clock_behind_ms: int) -> tuple[RunningVm, Vm]:
    sandbox_id = sandbox.sandbox_id
    with span("slot"):
        limits = capped(sandbox.quotas, parts.config.limits.quotas)
        slot = await parts.slots.acquire(sandbox.egress, limits.network_bytes_per_s)
    try:
        grown_mb = disk_growth.grown_disk_mb(sandbox, snapshot)
        record = plan(parts, snapshot, slot.number, cold=cold, alone=alone, grown_disk_mb=grown_mb)
        await parts.store.change(sandbox_id, vm=record)
    except BaseException:
        await parts.slots.release(slot.number)
        raise
    volume_mounts = await serve(parts, sandbox, record.run_id, slot)  # before the guest runs: it may have them mounted already
    record, vm = await launch_vm(parts, sandbox_id, record, snapshot, slot, cold=cold, asked=sandbox.quotas)
    parts.shared.vms[sandbox_id] = vm
    await parts.store.change(sandbox_id, vm=record)
    guest = parts.config.guest
    deadline_s = guest.boot_deadline_s if cold else guest.restore_deadline_s
    version = await _introduce(parts, sandbox, slot, vm, volume_mounts, deadline_s, cold, clock_behind_ms)
    await disk_growth.grow(parts, record, vm, slot.namespace, cold=cold)
    if cold and version != sandbox.envd_version:  # it runs this server's agent now, not the template's
        await parts.store.change(sandbox_id, envd_version=version)
    if cold:
        await start_again(parts, sandbox, slot.namespace, record.run_id)
    return record, vm


async def _open_stacks(parts: Parts, record: RunningVm, machine: Machine, slot: Slot) -> tuple[Path, Path]:
    lowers, upper = parts.layers.paths(record.disk_layers), parts.layers.upper(record.upper_layer)
    opened = await asyncio.gather(
        _open_memory(parts, record, machine),
        parts.blocks.open(record.disk_stack, lowers, upper, disk_growth.disk_bytes(record), "direct", owner=parts.vmm.user(slot.namespace)),
        return_exceptions=True,  # both to their end: an open that is still under way could come after the close that undoes it
    )
    for outcome in opened:
        if isinstance(outcome, BaseException):
            raise outcome
    memory, disk = (outcome for outcome in opened if isinstance(outcome, Stack))
    return memory.path, disk.path


async def open_memory(parts: Parts, stack_id: str, layers: tuple[str, ...], size_bytes: int | None = None) -> Stack:
    """Open memory as the VMs of this node map it; without layers it is blank, and has a size. The caller holds the stack's lock."""
    export = parts.vmm.memory
    return await parts.blocks.open(stack_id, parts.layers.paths(layers), None, size_bytes, "page", export.export, export.owner)


async def _open_memory(parts: Parts, record: RunningVm, machine: Machine) -> Stack:
    size_bytes = None if record.memory_layers else machine.memory_mb << 20
    async with parts.shared.locked(record.memory_stack):  # the sweep closes it under the same lock
        return await open_memory(parts, record.memory_stack, record.memory_layers, size_bytes)


async def _introduce(
    parts: Parts,
    sandbox: Sandbox,
    slot: Slot,
    vm: Vm,
    volume_mounts: tuple[tuple[str, str], ...],
    deadline_s: float,
    boots: bool,
    clock_behind_ms: int,
) -> str:
    """Wait for the guest and tell it who it is; an early end of its VMM is the better news of the two. Returns envd's version."""
    identity = GuestIdentity(
        sandbox.sandbox_id,
        sandbox.template_id,
        sandbox.access_token,
        sandbox.env_vars,
        parts.config.guest.dns_servers,
        volume_mounts,
        sandbox.default_user,
        sandbox.default_workdir,
    )
    hello = parts.guest.initialise(slot.namespace, identity, deadline_s, boots, clock_behind_ms)
    with span("guest"):
        version = await unless(vm.ended(), hello, lost_at_start)
    parts.shared.heard_ms[sandbox.sandbox_id] = parts.clock.monotonic_ms()
    return version


async def stop(parts: Parts, sandbox_id: str, record: RunningVm, vm: Vm | None) -> None:
    """Undo `start`, whatever part of it exists: end the VM and its volume server, close its disk, free its slot and folder.

    Call it once, after `record` was taken off the sandbox and `vm` out of `shared.vms`: later its slot may be another's. What cannot
    be freed now is tried again by `repair`, and by the next start of the server.
    """
    cleanup = Cleanup()
    cleanup.push("work folder", lambda: asyncio.to_thread(shutil.rmtree, parts.paths.vm(sandbox_id, record.run_id), True))
    cleanup.push("network slot", lambda: parts.slots.release(record.slot))
    cleanup.push("volume server", lambda: parts.volume_servers.stop(life(sandbox_id, record.run_id)))
    cleanup.push("disk", lambda: parts.blocks.close_stack(record.disk_stack, force=True))
    cleanup.push("control group", lambda: asyncio.to_thread(parts.cgroups.remove, life(sandbox_id, record.run_id)))
    if vm is not None:
        cleanup.push("VMM", lambda: _kill(parts, record, vm))
    if failed := await cleanup.run():
        parts.shared.unfreed.append(cleanup)
        await note(parts, sandbox_id, "some resources could not be freed; it is tried again", "error", what=", ".join(failed))


async def _kill(parts: Parts, record: RunningVm, vm: Vm) -> None:
    """End a VMM. One that waits in the kernel for a write of its device, which waits for room, ends when its device does."""
    kill = asyncio.ensure_future(vm.kill())
    try:
        await asyncio.wait({kill}, timeout=_KILL_GRACE_S)
        if not kill.done():
            await parts.blocks.close_stack(record.disk_stack, force=True)
    finally:
        await kill
