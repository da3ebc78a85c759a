"""Compact: keep the chains of a sandbox short, however often it is paused.

Reading a long chain costs nothing, but the format ends at 255 layers and every open reads every index. What the sandbox
shares with a template stays as it is; the layers above are merged into one. The merge runs beside everything else; only
the swap of the names takes the sandbox's lock. If it runs, its open disk goes on with the merged layer, and so does the
memory of its next snapshot, while its mapped memory goes on reading the old layers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from agentenv.core.errors import AgentEnvError, DataCorrupt
from agentenv.core.lifecycle import State
from agentenv.core.model import RunningVm, Snapshot
from agentenv.core.seals import is_broken, sealed
from agentenv.orchestrator.parts import Parts, note

_NEVER_LONGER = 200  # beyond this a resume waits for the merge: the format's own end (255) must not come near


async def compact(parts: Parts, sandbox_id: str, before: Snapshot, most: int | None = None, *, runs_on: bool = False) -> None:
    """Shorten the chains of `before`, a snapshot of the sandbox, if they are longer than `most`. A failure is noted and loses nothing.

    `runs_on`: the sandbox was not paused for it, so the newest layer of memory is the snapshot's alone; what lies below it is
    merged, which the sandbox's next snapshots have, too. The cost is the size of what the sandbox has changed in its life, once
    every `limits.layers_in_chain` (the default of `most`) captures.
    """
    most = most or parts.config.limits.layers_in_chain
    async with parts.shared.locked(f"merge-{sandbox_id}"):  # one at a time: the next one finds what this one has merged
        before = next((s for s in parts.store.snapshots() if s.snapshot_id == before.snapshot_id), before)
        shared_memory = before.memory_layers[:-1] if runs_on else before.memory_layers
        memory_id, disk_id = parts.layers.new_id(), parts.layers.new_id()
        with parts.layers.announced(memory_id, disk_id):
            try:
                memory = await _merge(parts, shared_memory, memory_id, most)
                disk = await _merge(parts, before.disk_layers, disk_id, most)
                if memory.run or disk.run:
                    await _swap(parts, sandbox_id, memory, disk)
            except AgentEnvError as error:
                await note(parts, sandbox_id, "its layers could not be merged", "warn", cause=str(error))


async def compact_if_endless(parts: Parts, sandbox_id: str) -> None:
    """Before a resume: a sandbox resumed again and again faster than its chains are merged has to wait once."""
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is not None and sandbox.state is State.PAUSED and sandbox.snapshot_id is not None:
        snapshot = parts.store.snapshot(sandbox.snapshot_id)
        if max(len(snapshot.memory_layers), len(snapshot.disk_layers)) > _NEVER_LONGER:
            await compact(parts, sandbox_id, snapshot)


@dataclass(frozen=True, slots=True)
class _Merge:
    """A run of layers in a chain, and the one layer that reads the same. Nothing was merged when `run` is empty."""

    kept: tuple[str, ...]
    run: tuple[str, ...]
    merged: str

    def is_in(self, layers: tuple[str, ...]) -> bool:
        """Whether `layers` have the run in the place it was merged in."""
        return bool(self.run) and layers[: len(self.kept) + len(self.run)] == self.kept + self.run

    def applied(self, layers: tuple[str, ...]) -> tuple[str, ...]:
        """`layers` with the run merged, if they have it."""
        return (*self.kept, self.merged, *layers[len(self.kept) + len(self.run) :]) if self.is_in(layers) else layers


async def _merge(parts: Parts, layers: tuple[str, ...], merged: str, most: int) -> _Merge:
    kept = _shared_with_others(parts, layers, most)
    if len(layers) <= max(most, kept + most // 2) or len(layers) - kept < 2:  # an image may have more than `most` by itself
        return _Merge(layers, (), merged)
    if damage := await asyncio.to_thread(parts.layers.damage, layers[kept:]):
        raise DataCorrupt(f"a layer is damaged: {damage}", "it is kept as it is")  # merged, the damage could not be seen any more
    await parts.blocks.commit(parts.layers.paths(layers[kept:]), parts.layers.path(merged))
    await asyncio.to_thread(parts.layers.seal, (merged,))
    return _Merge(layers[:kept], layers[kept:], merged)


def _shared_with_others(parts: Parts, layers: tuple[str, ...], most: int) -> int:
    """How many of the lowest layers stay as they are since they belong to a template or an image.

    Of a template that is a sandbox's snapshot only if they are few: a sandbox that is snapshotted again and again shares
    nearly all its layers with its own snapshots, and so does each generation of sandboxes made from the one before.
    """
    of_images = (image.layer_ids for image in parts.store.images.all())
    longest = max((len(theirs) for theirs in of_images if layers[: len(theirs)] == theirs), default=0)
    for template in parts.store.templates():
        for build in template.builds:
            snapshot = parts.store.snapshot(build.snapshot_id)
            for theirs in (snapshot.memory_layers, snapshot.disk_layers):
                if layers[: len(theirs)] == theirs and (template.kind != "snapshot" or len(theirs) <= most // 2):
                    longest = max(longest, len(theirs))
    return longest


async def _swap(parts: Parts, sandbox_id: str, memory: _Merge, disk: _Merge) -> None:
    async with parts.shared.locked(sandbox_id):
        for snapshot in parts.store.snapshots():  # of whoever: where the run lies, the merged layer means the same
            await parts.store.change_snapshot(snapshot.snapshot_id, lambda current: _shortened(current, memory, disk))
        sandbox = parts.store.sandbox(sandbox_id)
        if sandbox is not None and sandbox.state is State.RUNNING and sandbox.vm is not None:
            await _swap_running(parts, sandbox_id, sandbox.vm, memory, disk)
    await note(parts, sandbox_id, "its layers were merged", memory=str(len(memory.run)), disk=str(len(disk.run)))


def _shortened(snapshot: Snapshot, memory: _Merge, disk: _Merge) -> Snapshot:
    if is_broken(snapshot):
        return snapshot
    return sealed(replace(snapshot, memory_layers=memory.applied(snapshot.memory_layers), disk_layers=disk.applied(snapshot.disk_layers)))


async def _swap_running(parts: Parts, sandbox_id: str, record: RunningVm, memory: _Merge, disk: _Merge) -> None:
    """Its open disk reads the merged layer from now on. Its memory is mapped: only what it captures next builds on the merged layer."""
    changed = record
    if disk.is_in(record.disk_layers):
        await parts.blocks.replace(record.disk_stack, parts.layers.paths(disk.run), parts.layers.path(disk.merged))
        changed = replace(changed, disk_layers=disk.applied(record.disk_layers))
    if memory.is_in(record.memory_layers):
        held = tuple(dict.fromkeys((*record.held_layers, *memory.run)))
        changed = replace(changed, memory_layers=memory.applied(record.memory_layers), held_layers=held)
    if changed != record:
        await parts.store.change(sandbox_id, vm=changed)
