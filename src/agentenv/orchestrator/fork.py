"""Fork: children that go on from the same instant as a running or paused source, each with its own identity.

A running source is captured once and resumed before the first child starts. A paused source is not touched; children of
one that was paused without its memory boot from its disk.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from agentenv.core.ids import new_sandbox_id, new_token
from agentenv.core.lifecycle import State
from agentenv.core.model import Sandbox, StartOutcome
from agentenv.orchestrator.admission import admit
from agentenv.orchestrator.collect import make_room
from agentenv.orchestrator.create import launch, outcome_of
from agentenv.orchestrator.instant import instant
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.sweep import sweep_soon


async def fork(parts: Parts, sandbox_id: str, count: int, timeout_s: int) -> list[StartOutcome]:
    """`count` children. An error that concerns the source or the node fails the call; one child's own error is its outcome."""

    def check(source: Sandbox) -> None:
        admit(parts, source.machine)  # room for one child at least; each looks again for itself

    await make_room(parts)
    with contextlib.ExitStack() as held:  # beyond the lock: the source may be killed while its children start
        source, snapshot_id = await instant(parts, sandbox_id, State.FORKING, check, held, parts.config.limits.layers_in_chain)
        outcomes = await asyncio.gather(*(outcome_of(_child(parts, source, snapshot_id, timeout_s)) for _ in range(count)))
    sweep_soon(parts)
    return list(outcomes)


async def _child(parts: Parts, source: Sandbox, snapshot_id: str, timeout_s: int) -> Sandbox:
    now_ms = parts.clock.now_ms()
    child = replace(
        source,
        sandbox_id=new_sandbox_id(),
        state=State.CREATING,
        started_at_ms=now_ms,
        end_at_ms=now_ms + 1000 * timeout_s,
        timeout_s=timeout_s,
        access_token=new_token() if source.access_token else "",
        traffic_token=None if source.allow_public_traffic else new_token(),
        snapshot_id=snapshot_id,
        vm=None,
        pause_mode="full",
        creation=None,
        checkpoint_id="",
        reason="",
    )
    admit(parts, child.machine)
    return await launch(parts, child)
