"""Sweep: forget snapshots nobody refers to, delete layers nothing reaches, close shared memory nobody maps.

Marks come from the database alone plus what verbs under way have announced; a sweep that is killed half-way is simply
done again. Templates' snapshots are always kept.
"""

from __future__ import annotations

import asyncio

from agentenv.core.lifecycle import State
from agentenv.core.model import Sandbox
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.start import memory_stack_id
from agentenv.snapshot import capture


def sweep_soon(parts: Parts) -> None:
    """Sweep once in the background; calls while one waits are joined to it."""
    if not parts.shared.sweep_wanted:
        parts.shared.sweep_wanted = True
        parts.shared.background(_soon(parts), "sweep")


async def _soon(parts: Parts) -> None:
    await asyncio.sleep(0.2)  # a burst of kills needs one sweep
    parts.shared.sweep_wanted = False
    await sweep(parts)


async def sweep(parts: Parts) -> int:
    """Sweep now; returns the bytes freed."""
    async with parts.shared.sweeping:
        live = [s for s in parts.store.sandboxes() if s.state is not State.KILLED]
        wanted = {t.snapshot_id for t in parts.store.templates()} | {s.snapshot_id for s in live if s.snapshot_id}
        for snapshot in parts.store.snapshots():
            if snapshot.snapshot_id not in wanted and snapshot.snapshot_id not in parts.shared.snapshots_in_use:
                await parts.store.remove_snapshot(snapshot.snapshot_id)
                await asyncio.to_thread(capture.remove, parts.paths, snapshot.snapshot_id)
        await _close_memory(parts, live)
        return await asyncio.to_thread(parts.layers.sweep, _referenced(parts))


def _referenced(parts: Parts) -> set[str]:
    marks: set[str] = set()
    for snapshot in parts.store.snapshots():
        marks.update(snapshot.memory_layers, snapshot.disk_layers)
    for sandbox in parts.store.sandboxes():
        if sandbox.vm is not None:
            marks.update(sandbox.vm.memory_layers, sandbox.vm.disk_layers, {sandbox.vm.upper_layer})
    return marks


async def _close_memory(parts: Parts, live: list[Sandbox]) -> None:
    kept = {memory_stack_id(parts.store.snapshot(t.snapshot_id).memory_layers) for t in parts.store.templates()}
    kept |= {s.vm.memory_stack for s in live if s.vm is not None}
    for stack in await parts.blocks.stacks():
        if stack.stack_id.startswith("mem-") and stack.stack_id not in kept and stack.open_handles == 0:
            await parts.blocks.close_stack(stack.stack_id)
