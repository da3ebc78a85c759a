"""Freeze a running VM into a snapshot: device state, diverged memory, and the disk's upper sealed in place.

What diverged is found by `blockd` in the VMM's process, against what that process maps; or the VMM writes it itself, against what
it has written before (`Vm.writer`). Then what one capture has taken is missing in the next, so it must stay on the VM's record;
where that is not sure, the record says so, and all of the memory is written anew.

Order and why: the VM is stopped; state and memory are written first, since they may run out of room; the seal comes
last, since after it the disk goes on with a fresh upper. On any failure what was written is removed and the VM runs on.
A snapshot of the disk alone has no state and no memory; its caller has seen to it that the guest's files are written out.
Nothing here touches the database: the caller records the snapshot, or removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv.block.client import BlockClient, Upper
from agentenv.core.clock import Clock
from agentenv.core.errors import AgentEnvError
from agentenv.core.model import Machine, RunningVm, Snapshot, VmIdentity
from agentenv.core.paths import NodePaths
from agentenv.core.seals import sealed as with_seal
from agentenv.core.spans import span
from agentenv.snapshot.layers import LayerStore
from agentenv.vmm.driver import MemoryFile, User, Vm

WRITTEN = "capture-"
"""The stack a VMM writes memory to: this, and the id of the layer that it becomes, which is announced for as long."""


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Every name a capture will use, chosen before its first side effect."""

    snapshot_id: str
    memory_layer: str
    fresh_upper: str


@dataclass(frozen=True, slots=True)
class Captured:
    """The snapshot, the VM's record with its new disk stack, and how much memory had diverged."""

    snapshot: Snapshot
    vm: RunningVm
    memory_bytes: int


class Capturer:
    """Makes snapshots of VMs of one node."""

    def __init__(self, blocks: BlockClient, layers: LayerStore, paths: NodePaths, clock: Clock) -> None:
        self._blocks, self._layers, self._paths, self._clock = blocks, layers, paths, clock

    async def capture(
        self, plan: CapturePlan, vm: Vm, record: RunningVm, machine: Machine, identity: VmIdentity, memory: bool = True
    ) -> Captured:
        """Stop `vm` and capture it, or its disk alone; it is left stopped. The caller keeps the plan's layers announced until recorded.

        On failure the VM has been resumed and no file is left; its disk stack is as before, or (when the answer to the
        seal was lost) already writes to the plan's fresh upper. StorageFull, Internal.
        """
        with span("stop"):
            await vm.pause()
        try:
            memory_bytes = await self._write(plan, vm, record, machine, memory)
            with span("seal"):
                sealed = await self._blocks.seal(record.disk_stack, self._layers.upper(plan.fresh_upper))
        except BaseException:
            await asyncio.shield(self._undo(plan, vm))
            raise
        # What the disk really has, not what the record says: an earlier seal may have worked although its answer was lost.
        disk_layers = tuple(self._layers.id_of(path) for path in sealed.lowers)
        builds_on = () if record.needs_whole_memory else record.memory_layers
        memory_layers = (*builds_on, plan.memory_layer) if memory else ()
        snapshot = Snapshot(
            snapshot_id=plan.snapshot_id,
            machine=machine,
            identity=identity,
            memory_layers=memory_layers,
            disk_layers=disk_layers,
            created_at_ms=self._clock.now_ms(),
            state_sha256=await asyncio.to_thread(self._noted, plan, (*memory_layers, *disk_layers), memory),
        )
        after = replace(record, disk_layers=disk_layers, upper_layer=plan.fresh_upper)
        if memory and vm.writer is not None:
            after = replace(after, memory_layers=memory_layers, needs_whole_memory=False)
        return Captured(with_seal(snapshot), after, memory_bytes)

    def _noted(self, plan: CapturePlan, layers: tuple[str, ...], memory: bool) -> str:
        """Note what the layers are from now on; the digest of the device state, if there is one. Blocks."""
        self._layers.seal(layers)
        if not memory:
            return ""
        return hashlib.sha256(state_file(self._paths, plan.snapshot_id).read_bytes()).hexdigest()

    async def _write(self, plan: CapturePlan, vm: Vm, record: RunningVm, machine: Machine, with_memory: bool) -> int:
        folder = self._paths.snapshot(plan.snapshot_id)
        folder.mkdir(parents=True)
        if not with_memory:
            return 0
        if vm.writer is not None:
            with span("write"):
                return await self._written_by(vm, vm.writer, plan, record, machine)
        memory = asyncio.create_task(self._blocks.capture(record.pid, record.memory_stack, self._layers.path(plan.memory_layer)))
        state = asyncio.create_task(vm.save_state(state_file(self._paths, plan.snapshot_id)))
        with span("write"):
            await asyncio.wait({memory, state})  # both to their end: a failed one must not leave the other writing
        await state
        return (await memory).size_bytes

    async def _written_by(self, vm: Vm, writer: User, plan: CapturePlan, record: RunningVm, machine: Machine) -> int:
        """Let the VMM write its memory into a layer of its own. Returns the layer's size in bytes."""
        stack_id, layer = f"{WRITTEN}{plan.memory_layer}", self._layers.path(plan.memory_layer)
        unused = self._layers.upper(f"{plan.memory_layer}-unused")  # a seal goes on with another upper
        try:
            upper = self._layers.upper(plan.memory_layer)
            stack = await self._blocks.open(stack_id, (), upper, machine.memory_mb << 20, "direct", "fuse", writer, True)
            memory = MemoryFile(stack.path, record.needs_whole_memory)
            await vm.save_state(state_file(self._paths, plan.snapshot_id), memory)
            await self._blocks.seal(stack_id, unused)
            return (await asyncio.to_thread(layer.stat)).st_size
        finally:
            await asyncio.shield(self._end_writing(stack_id, unused))

    async def _end_writing(self, stack_id: str, unused: Upper) -> None:
        with contextlib.suppress(AgentEnvError):  # the layer is whole all the same; the sweep closes it
            await self._blocks.close_stack(stack_id, force=True)
        for path in (unused.data, unused.index):
            path.unlink(missing_ok=True)

    async def _undo(self, plan: CapturePlan, vm: Vm) -> None:
        try:
            await vm.resume()
        finally:
            remove(self._paths, plan.snapshot_id)
            for path in (self._layers.upper(plan.memory_layer).data, self._layers.upper(plan.memory_layer).index):
                path.unlink(missing_ok=True)


def state_file(paths: NodePaths, snapshot_id: str) -> Path:
    """Where a snapshot's device state is."""
    return paths.snapshot(snapshot_id) / "vm.state"


def remove(paths: NodePaths, snapshot_id: str) -> None:
    """Remove a snapshot's own files (its layers are the sweep's). No error when they are gone."""
    shutil.rmtree(paths.snapshot(snapshot_id), ignore_errors=True)


def snapshot_ids(paths: NodePaths) -> list[str]:
    """The snapshots that have a folder, recorded or not."""
    return [folder.name for folder in paths.snapshots.iterdir()] if paths.snapshots.is_dir() else []
