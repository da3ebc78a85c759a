"""Repair: bring what no verb works on any more to a state it can rest in, and free what could not be freed.

A verb that fails half-way undoes itself; when even that fails (the node's disk is full for a moment, blockd restarts), the
sandbox stays where it was and is settled here a little later. The same table serves `reconcile` after a crash.
"""

from __future__ import annotations

import logging

from agentenv.core.errors import AgentEnvError
from agentenv.core.lifecycle import CAPTURING, State
from agentenv.core.model import Sandbox
from agentenv.orchestrator import delete
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.pause import run_on
from agentenv.orchestrator.resume import back_to_paused
from agentenv.orchestrator.rollback import undo

_log = logging.getLogger(__name__)
_RESTING = (State.RUNNING, State.PAUSED, State.KILLED)


async def repair(parts: Parts) -> bool:
    """Settle what rests in a state between two others. False when something is still left to do. Never raises ours."""
    done = True
    for sandbox in parts.store.sandboxes():
        if sandbox.state in _RESTING or parts.shared.is_locked(sandbox.sandbox_id):
            continue
        async with parts.shared.locked(sandbox.sandbox_id):
            try:
                await settle(parts, sandbox.sandbox_id, "it was not finished")
            except AgentEnvError as error:
                _log.error("%s stays %s for now: %s", sandbox.sandbox_id, sandbox.state, error)
                done = False
    for cleanup in list(parts.shared.unfreed):
        if not await cleanup.run():
            parts.shared.unfreed.remove(cleanup)
    return done and not parts.shared.unfreed


async def settle(parts: Parts, sandbox_id: str, why: str) -> None:
    """Bring one sandbox, whose lock the caller holds, to rest. `why` is the reason if it must end."""
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is None or sandbox.state in _RESTING:
        return
    if sandbox.state is State.RESUMING:
        await back_to_paused(parts, sandbox_id)
    elif sandbox.state is State.ROLLING_BACK:
        await undo(parts, sandbox_id, why)
    elif sandbox.state in CAPTURING and sandbox.vm is not None:
        await run_on(parts, sandbox_id, sandbox.vm, why)
    else:
        await delete.end(parts, sandbox, _reason(sandbox, why))


def _reason(sandbox: Sandbox, why: str) -> str:
    return sandbox.reason or why
