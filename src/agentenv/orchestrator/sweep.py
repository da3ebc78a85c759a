"""Sweep: forget snapshots nobody refers to, delete layers nothing reaches, close shared memory nobody maps.

Marks come from the database, from blockd's open stacks and from what verbs under way have announced. What might go is
always listed before the marks are gathered, and nothing is named for the first time after that, so a mark that is
missing then stays missing. A sweep that is killed half-way is simply done again. What a template's build, the cache of
build steps or the record of an image names is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set

from agentenv.core.lifecycle import State
from agentenv.core.model import RunningVm
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.start import memory_stack_id
from agentenv.orchestrator.templates import all_builds, hot_snapshot_ids
from agentenv.snapshot import capture

_DELAY_MS = 200  # a burst of kills needs one sweep


def sweep_soon(parts: Parts) -> None:
    """Sweep once in the background; calls while one waits are joined to it."""
    if not parts.shared.sweep_wanted:
        parts.shared.sweep_wanted = True
        parts.shared.background(_soon(parts), "sweep")


async def _soon(parts: Parts) -> None:
    await parts.clock.sleep_ms(_DELAY_MS)
    parts.shared.sweep_wanted = False
    await sweep(parts)


async def sweep(parts: Parts) -> int:
    """Sweep now; returns the bytes freed."""
    async with parts.shared.sweeping:
        await _forget_snapshots(parts)
        await _close_memory(parts)
        files = await asyncio.to_thread(parts.layers.files)
        reached = await served(parts) | referenced(parts)
        return await asyncio.to_thread(parts.layers.delete, parts.layers.unneeded(files, reached))


async def _forget_snapshots(parts: Parts) -> None:
    await _forget_checkpoints(parts)
    on_disk = await asyncio.to_thread(capture.snapshot_ids, parts.paths)
    recorded = {snapshot.snapshot_id for snapshot in parts.store.snapshots()}
    cached = {step.snapshot_id for step in parts.store.cached_steps.all()}
    for snapshot_id in {*on_disk, *recorded} - wanted_snapshots(parts) - cached:
        await parts.store.remove_snapshot(snapshot_id)
        await asyncio.to_thread(capture.remove, parts.paths, snapshot_id)


async def _forget_checkpoints(parts: Parts) -> None:
    """Those of sandboxes that have ended."""
    alive = {s.sandbox_id for s in parts.store.sandboxes() if s.state is not State.KILLED}
    for checkpoint in parts.store.checkpoints.all():
        if checkpoint.sandbox_id not in alive:
            await parts.store.checkpoints.remove(checkpoint.checkpoint_id)


def wanted_snapshots(parts: Parts) -> set[str]:
    """The snapshots that sandboxes, templates and verbs under way need; those of cached build steps alone are not among them."""
    named = {s.snapshot_id for s in parts.store.sandboxes() if s.state is not State.KILLED and s.snapshot_id is not None}
    images = (image.snapshot_id for image in parts.store.images.all())
    kept = (checkpoint.snapshot_id for checkpoint in parts.store.checkpoints.all())
    builds = (build.snapshot_id for build in all_builds(parts.store))
    return {*parts.shared.snapshots_in_use, *named, *images, *kept, *builds}


async def served(parts: Parts) -> set[str]:
    """The layers of blockd's open stacks."""
    return {parts.layers.id_of(path) for stack in await parts.blocks.stacks() for path in stack.files}


def referenced(parts: Parts, leaving_out: Set[str] = frozenset(), *, images: bool = True) -> set[str]:
    """The layers that records name, but for those that only the snapshots `leaving_out` do, or only `images`."""
    marks: set[str] = set()
    for snapshot in parts.store.snapshots():
        if snapshot.snapshot_id not in leaving_out:
            marks.update(snapshot.memory_layers, snapshot.disk_layers)
    for image in parts.store.images.all() if images else ():
        marks.update(image.layer_ids)
    for vm in _vms(parts):
        marks.update(vm.layer_ids)
    return marks


def _vms(parts: Parts) -> list[RunningVm]:
    """Every VM: those of sandboxes, and those that stand ready to become one."""
    return [*(sandbox.vm for sandbox in parts.store.sandboxes() if sandbox.vm is not None), *parts.shared.warm.records()]


async def _close_memory(parts: Parts) -> None:
    for stack in await parts.blocks.stacks():
        layer_id = stack.stack_id.removeprefix(capture.WRITTEN)
        if layer_id != stack.stack_id and not parts.layers.is_announced(layer_id):  # its capture has ended
            await parts.blocks.close_stack(stack.stack_id, force=True)
        if not stack.stack_id.startswith("mem-") or stack.open_handles:
            continue
        async with parts.shared.locked(stack.stack_id):  # no start opens it between the look and the close
            if not _memory_wanted(parts, stack.stack_id):
                await parts.blocks.close_stack(stack.stack_id)


def _memory_wanted(parts: Parts, stack_id: str) -> bool:
    hot = hot_snapshot_ids(parts.store)
    return any(vm.memory_stack == stack_id for vm in _vms(parts)) or any(
        snapshot.has_memory and memory_stack_id(snapshot.memory_layers) == stack_id for snapshot in map(parts.store.snapshot, hot)
    )
