"""Fork: children that go on from the same instant as a running or paused source, each with its own identity.

A running source is captured once and resumed before the first child starts. A paused source is not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from agentenv.core.errors import AgentEnvError, Conflict
from agentenv.core.ids import new_sandbox_id, new_token
from agentenv.core.lifecycle import State
from agentenv.core.model import ForkOutcome, RunningVm, Sandbox
from agentenv.host.files import require_free
from agentenv.orchestrator.admission import admit
from agentenv.orchestrator.create import launch
from agentenv.orchestrator.delete import missing
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.pause import live_vm, plan_capture, run_on, take
from agentenv.orchestrator.sweep import sweep_soon


async def fork(parts: Parts, sandbox_id: str, count: int, timeout_s: int) -> list[ForkOutcome]:
    """`count` children. An error that concerns the source or the node fails the call; one child's own error is its outcome."""
    with contextlib.ExitStack() as held:  # beyond the lock: the source may be killed while its children start
        source, snapshot_id = await _instant(parts, sandbox_id, count, held)
        outcomes = await asyncio.gather(*(_child(parts, source, snapshot_id, timeout_s) for _ in range(count)))
    sweep_soon(parts)
    return list(outcomes)


async def _instant(parts: Parts, sandbox_id: str, count: int, held: contextlib.ExitStack) -> tuple[Sandbox, str]:
    """The source and the snapshot its children go on from, which `held` keeps from the sweep."""
    async with parts.shared.locked(sandbox_id):
        source = parts.store.sandbox(sandbox_id)
        if source is None or source.state in (State.KILLING, State.KILLED):
            raise missing(sandbox_id)
        admit(parts, source.machine)  # room for one child at least; each looks again for itself
        if source.state is State.PAUSED and source.snapshot_id is not None:
            snapshot_id = source.snapshot_id
        elif source.state is State.RUNNING and source.vm is not None:
            snapshot_id = await _capture(parts, source, source.vm)
        else:
            raise Conflict(f"sandbox {sandbox_id} is {source.state}")
        held.enter_context(parts.shared.using(snapshot_id))
    return source, snapshot_id


async def _capture(parts: Parts, source: Sandbox, record: RunningVm) -> str:
    sandbox_id = source.sandbox_id
    require_free(parts.paths.home, parts.config.limits.disk_reserve_mb << 20, "a fork")
    plan = plan_capture(parts)
    began_ms = parts.clock.monotonic_ms()
    await parts.store.transition(sandbox_id, State.RUNNING, State.FORKING)
    with parts.layers.announced(plan.memory_layer, plan.fresh_upper), parts.shared.using(plan.snapshot_id):
        try:
            captured = await take(parts, source, record, plan)
            record = captured.vm
            await live_vm(parts, sandbox_id).resume()  # first of all: the source stands still for the capture only
            stopped_ms = parts.clock.monotonic_ms() - began_ms
            await parts.store.add_snapshot(captured.snapshot)
        except BaseException as error:
            await run_on(parts, sandbox_id, record, str(error) if isinstance(error, AgentEnvError) else type(error).__name__)
            raise
        await run_on(parts, sandbox_id, record)
        await note(parts, sandbox_id, "captured for a fork", stopped_ms=f"{stopped_ms:.0f}", memory_bytes=str(captured.memory_bytes))
    return plan.snapshot_id  # no other task runs before the caller takes hold of it


async def _child(parts: Parts, source: Sandbox, snapshot_id: str, timeout_s: int) -> ForkOutcome:
    now_ms = parts.clock.now_ms()
    child = replace(
        source,
        sandbox_id=new_sandbox_id(),
        state=State.CREATING,
        started_at_ms=now_ms,
        end_at_ms=now_ms + 1000 * timeout_s,
        timeout_s=timeout_s,
        access_token=new_token(),
        traffic_token=None if source.allow_public_traffic else new_token(),
        snapshot_id=snapshot_id,
        vm=None,
        reason="",
    )
    try:
        admit(parts, child.machine)
        return ForkOutcome(await launch(parts, child))
    except AgentEnvError as error:
        return ForkOutcome(None, error.status, str(error))
