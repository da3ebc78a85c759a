"""Checkpoint: an instant that the same sandbox can be rolled back to, as often as wanted. They form a tree and end with the sandbox."""

from __future__ import annotations

import contextlib

from agentenv.core import checkpoints
from agentenv.core.errors import LimitReached
from agentenv.core.ids import new_checkpoint_id
from agentenv.core.lifecycle import State
from agentenv.core.model import Checkpoint, Sandbox
from agentenv.orchestrator.delete import alive
from agentenv.orchestrator.instant import instant
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.sweep import sweep_soon


def of_sandbox(parts: Parts, sandbox_id: str) -> list[Checkpoint]:
    """Its checkpoints, oldest first."""
    return [checkpoint for checkpoint in parts.store.checkpoints.all() if checkpoint.sandbox_id == sandbox_id]


async def checkpoint(parts: Parts, sandbox_id: str, name: str, memory: bool = True) -> Checkpoint:
    """Keep this instant of a running or paused sandbox, which goes on. Without `memory` it is the disk alone: a rollback boots it.

    InvalidInput, Conflict (the name is taken), LimitReached, and what `instant` raises. Nothing is kept after a failure.
    """
    limit = parts.config.limits.checkpoints_of_sandbox

    def check(_: Sandbox) -> None:
        present = of_sandbox(parts, sandbox_id)
        checkpoints.check_name(present, name)
        if len(present) >= limit:
            raise LimitReached(
                f"sandbox {sandbox_id} has {limit} checkpoints, its limit", "delete some, or raise limits.checkpoints_of_sandbox"
            )

    async with parts.shared.locked(tree(sandbox_id)):
        with contextlib.ExitStack() as held:
            # The sandbox itself goes on from it again and again: its own chain is what there is to keep short.
            most_layers = parts.config.limits.layers_in_chain
            source, snapshot_id = await instant(parts, sandbox_id, State.SNAPSHOTTING, check, held, most_layers, memory)
            snapshot = parts.store.snapshot(snapshot_id)
            now_ms = parts.clock.now_ms()
            kept = Checkpoint(new_checkpoint_id(), sandbox_id, snapshot_id, name, source.checkpoint_id, snapshot.has_memory, now_ms)
            await parts.store.checkpoints.put(kept)
            await parts.store.change(sandbox_id, checkpoint_id=kept.checkpoint_id)
    await note(parts, sandbox_id, "checkpoint taken", checkpoint=kept.name or kept.checkpoint_id)
    return kept


async def remove(parts: Parts, sandbox_id: str, reference: str) -> None:
    """Forget a checkpoint; those that descend from it stay, below its parent. NotFound."""
    async with parts.shared.locked(tree(sandbox_id)):
        sandbox = alive(parts, sandbox_id)
        present = of_sandbox(parts, sandbox_id)
        gone = checkpoints.named(present, sandbox_id, reference)
        for child in checkpoints.orphans(present, gone):
            await parts.store.checkpoints.put(child)
        if sandbox.checkpoint_id == gone.checkpoint_id:
            await parts.store.change(sandbox_id, checkpoint_id=gone.parent_id)
        await parts.store.checkpoints.remove(gone.checkpoint_id)
    sweep_soon(parts)


def tree(sandbox_id: str) -> str:
    """The lock of a sandbox's tree. Who holds it may take the sandbox's own lock, never the other way round."""
    return f"checkpoints-{sandbox_id}"
