"""Instant: one moment of a running or paused sandbox, kept for others to go on from; the sandbox itself goes on as before.

A running one stands still for the capture only. A paused one is not touched: its snapshot is that moment already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from agentenv.core.errors import AgentEnvError, Conflict
from agentenv.core.ids import new_snapshot_id
from agentenv.core.lifecycle import State
from agentenv.core.model import RunningVm, Sandbox
from agentenv.core.seals import sealed
from agentenv.host.files import require_free
from agentenv.orchestrator.collect import make_room
from agentenv.orchestrator.compact import compact
from agentenv.orchestrator.delete import alive
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.pause import live_vm, plan_capture, run_on, take, thaw
from agentenv.orchestrator.resume import refuse_unresponsive


async def instant(
    parts: Parts,
    sandbox_id: str,
    via: State,
    check: Callable[[Sandbox], object],
    held: contextlib.ExitStack,
    most_layers: int,
    memory: bool = True,
) -> tuple[Sandbox, str]:
    """The source and the snapshot to go on from, which `held` keeps from the sweep until a record names it.

    Without `memory` it is the disk alone: a running guest writes its files out first.

    `via` is the state a running source passes through. `check` sees the source first, and may refuse. Chains longer than
    `most_layers` are merged afterwards. NotFound, Conflict, StorageFull; the source runs on after any failure.
    """
    async with parts.shared.locked(sandbox_id):
        source = alive(parts, sandbox_id)
        check(source)
        if source.state is State.PAUSED and source.snapshot_id is not None:
            if memory:
                refuse_unresponsive(source)
            snapshot_id = source.snapshot_id if memory else await _disk_of(parts, source.snapshot_id)
        elif source.state is State.RUNNING and source.vm is not None:
            snapshot_id = await _capture(parts, source, source.vm, via, memory)
        else:
            raise Conflict(f"sandbox {sandbox_id} is {source.state}")
        held.enter_context(parts.shared.using(snapshot_id))  # no other task has run since the capture let go of it
    runs_on = source.state is State.RUNNING
    chain = parts.store.snapshot(snapshot_id if runs_on else source.snapshot_id or "")
    parts.shared.background(compact(parts, sandbox_id, chain, most_layers, runs_on=runs_on), f"compact {sandbox_id}")
    return source, snapshot_id


async def _disk_of(parts: Parts, snapshot_id: str) -> str:
    """A snapshot of the disk that `snapshot_id` has: itself if it has nothing else. Its disk is then as after a power cut."""
    snapshot = parts.store.snapshot(snapshot_id)
    if not snapshot.has_memory:
        return snapshot_id
    now_ms = parts.clock.now_ms()
    disk = sealed(replace(snapshot, snapshot_id=new_snapshot_id(), memory_layers=(), state_sha256="", created_at_ms=now_ms))
    with parts.shared.using(disk.snapshot_id):
        parts.paths.snapshot(disk.snapshot_id).mkdir(parents=True)
        await parts.store.add_snapshot(disk)
    return disk.snapshot_id  # no other task runs before the caller takes hold of it


async def _capture(parts: Parts, source: Sandbox, record: RunningVm, via: State, memory: bool) -> str:
    sandbox_id = source.sandbox_id
    await make_room(parts)
    require_free(parts.paths.home, parts.config.limits.disk_reserve_mb << 20, "a capture")
    plan = plan_capture(parts)
    began_ms = parts.clock.monotonic_ms()
    await parts.store.transition(sandbox_id, State.RUNNING, via)
    with parts.layers.announced(plan.memory_layer, plan.fresh_upper), parts.shared.using(plan.snapshot_id):
        try:
            captured = await take(parts, source, record, plan, memory)
            record = captured.vm
            await live_vm(parts, sandbox_id).resume()  # first of all: the source stands still for the capture only
            if not memory:
                await thaw(parts, sandbox_id, record)
            stopped_ms = parts.clock.monotonic_ms() - began_ms
            await parts.store.add_snapshot(captured.snapshot)
        except BaseException as error:
            await run_on(parts, sandbox_id, record, str(error) if isinstance(error, AgentEnvError) else type(error).__name__)
            raise
        await run_on(parts, sandbox_id, record)
        figures = {"stopped_ms": f"{stopped_ms:.0f}", "memory_bytes": str(captured.memory_bytes)}
        await note(parts, sandbox_id, "captured, runs on", why=via, **figures)
    return plan.snapshot_id
