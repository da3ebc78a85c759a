"""Compact: keep the chains of a sandbox short, however often it is paused.

Reading a long chain costs nothing, but the format ends at 255 layers and every open reads every index. What the sandbox
shares with a template stays as it is; the layers above are merged into one. The merge runs beside everything else; only
the swap of the names takes the sandbox's lock. If it has been resumed meanwhile, its next snapshot builds on the merged
layers, while its open stacks go on reading the old ones.
"""

from __future__ import annotations

from dataclasses import replace

from agentenv.core.errors import AgentEnvError
from agentenv.core.lifecycle import State
from agentenv.core.model import RunningVm, Snapshot
from agentenv.orchestrator.parts import Parts, note

_NEVER_LONGER = 200  # beyond this a resume waits for the merge: the format's own end (255) must not come near


async def compact(parts: Parts, sandbox_id: str, before: Snapshot, most: int | None = None) -> None:
    """Shorten the chains of `before`, a sandbox's latest snapshot, if they are longer than `most`. A failure is noted and changes nothing.

    The cost is the size of what the sandbox has changed in its life, once every `limits.layers_in_chain` (the default of `most`) captures.
    """
    most = most or parts.config.limits.layers_in_chain
    memory, disk = parts.layers.new_id(), parts.layers.new_id()
    with parts.layers.announced(memory, disk):
        try:
            after = replace(
                before,
                memory_layers=await _merge(parts, before.memory_layers, memory, most),
                disk_layers=await _merge(parts, before.disk_layers, disk, most),
            )
        except AgentEnvError as error:
            await note(parts, sandbox_id, "its layers could not be merged", "warn", cause=str(error))
            return
        if after != before:
            await _swap(parts, sandbox_id, before, after)


async def compact_if_endless(parts: Parts, sandbox_id: str) -> None:
    """Before a resume: a sandbox resumed again and again faster than its chains are merged has to wait once."""
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is not None and sandbox.state is State.PAUSED and sandbox.snapshot_id is not None:
        snapshot = parts.store.snapshot(sandbox.snapshot_id)
        if max(len(snapshot.memory_layers), len(snapshot.disk_layers)) > _NEVER_LONGER:
            await compact(parts, sandbox_id, snapshot)


async def _merge(parts: Parts, layers: tuple[str, ...], merged: str, most: int) -> tuple[str, ...]:
    kept = _shared_with_templates(parts, layers, most)
    if len(layers) <= most or len(layers) - kept < 2:
        return layers
    await parts.blocks.commit(parts.layers.paths(layers[kept:]), parts.layers.path(merged))
    return (*layers[:kept], merged)


def _shared_with_templates(parts: Parts, layers: tuple[str, ...], most: int) -> int:
    """How many of the lowest layers stay as they are since they belong to a template.

    Of a template that is a sandbox's snapshot only if they are few: a sandbox that is snapshotted again and again shares
    nearly all its layers with its own snapshots, and so does each generation of sandboxes made from the one before.
    """
    longest = 0
    for template in parts.store.templates():
        for build in template.builds:
            snapshot = parts.store.snapshot(build.snapshot_id)
            for theirs in (snapshot.memory_layers, snapshot.disk_layers):
                if layers[: len(theirs)] == theirs and (template.kind != "snapshot" or len(theirs) <= most // 2):
                    longest = max(longest, len(theirs))
    return longest


async def _swap(parts: Parts, sandbox_id: str, before: Snapshot, after: Snapshot) -> None:
    async with parts.shared.locked(sandbox_id):
        is_recorded = before in parts.store.snapshots()
        if is_recorded:  # of the paused sandbox, or of a template, or of nobody any more: it is the same content for all
            await parts.store.replace_snapshot(after)
        sandbox = parts.store.sandbox(sandbox_id)
        vm = sandbox.vm if sandbox is not None and sandbox.state is State.RUNNING else None
        if vm is not None and _builds_on(vm, before):
            await parts.store.change(sandbox_id, vm=_moved(vm, before, after))
        elif not is_recorded:
            return
    await note(
        parts, sandbox_id, "its layers were merged", memory_layers=str(len(after.memory_layers)), disk_layers=str(len(after.disk_layers))
    )


def _builds_on(record: RunningVm, snapshot: Snapshot) -> bool:
    memory, disk = snapshot.memory_layers, snapshot.disk_layers
    return record.memory_layers[: len(memory)] == memory and record.disk_layers[: len(disk)] == disk


def _moved(record: RunningVm, before: Snapshot, after: Snapshot) -> RunningVm:
    """The record on the merged layers; what its stacks have open stays held."""
    return replace(
        record,
        memory_layers=after.memory_layers + record.memory_layers[len(before.memory_layers) :],
        disk_layers=after.disk_layers + record.disk_layers[len(before.disk_layers) :],
        held_layers=tuple(dict.fromkeys((*record.held_layers, *before.memory_layers, *before.disk_layers))),
    )
