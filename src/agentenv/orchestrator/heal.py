"""Heal: a VM whose disk write found no room on the host, or would have, stands still, unharmed; it goes on when there is room.

Either the VMM or, of a device, the block server keeps the write and repeats it, or `disk_watch` stopped the VM before: the guest sees
a long pause and no error, and nothing is lost. Caches give way first. If that is not enough a build ends, rather than to hold what
others wait for; what it had cached so far is kept. A volume server that has died is started again; the guest's programs wait for it
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging

from agentenv.core.errors import AgentEnvError
from agentenv.core.lifecycle import State
from agentenv.orchestrator.collect import make_room, use
from agentenv.orchestrator.delete import end
from agentenv.orchestrator.disk_watch import reserve_bytes
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.serve_volumes import look_after

_log = logging.getLogger(__name__)
_INTERVAL_MS = 5_000
_ROOM_BYTES = 16 << 20  # less than this is gone again at the next writeback


async def run(parts: Parts) -> None:
    """Look after stalled VMs until cancelled."""
    known: set[str] = set()
    while True:
        await parts.clock.sleep_ms(_INTERVAL_MS)
        running = [sandbox.sandbox_id for sandbox in parts.store.sandboxes() if sandbox.state is State.RUNNING]
        waiting = await _waiting(parts)
        outcomes = await asyncio.gather(*(_look_after(parts, sandbox_id, known, waiting) for sandbox_id in running), return_exceptions=True)
        for sandbox_id, outcome in zip(running, outcomes, strict=True):
            if isinstance(outcome, Exception):  # a fault met with one sandbox must not end the care for all others
                _log.error("looking after %s failed, will be tried again", sandbox_id, exc_info=outcome)


async def _waiting(parts: Parts) -> frozenset[str]:
    """Stacks whose writes the block server keeps until there is room; none while it cannot be asked."""
    if use(parts).free_bytes >= _ROOM_BYTES + reserve_bytes(parts):
        return frozenset()
    try:
        return frozenset(stack.stack_id for stack in await parts.blocks.stacks() if stack.waits_for_room)
    except AgentEnvError as error:
        _log.debug("the block server cannot be asked what waits for room: %s", error)
        return frozenset()


async def _look_after(parts: Parts, sandbox_id: str, known: set[str], waiting: frozenset[str]) -> None:
    async with parts.shared.locked(sandbox_id):
        sandbox, vm = parts.store.sandbox(sandbox_id), parts.shared.vms.get(sandbox_id)
        if sandbox is None or sandbox.state is not State.RUNNING or vm is None:
            known.discard(sandbox_id)
            return
        try:
            await look_after(parts, sandbox)
            # A VMM whose write is kept may not answer before that is done, and goes on by itself then.
            is_kept = sandbox.vm is not None and sandbox.vm.disk_stack in waiting
            if is_kept or await vm.stalled():
                room_bytes = _ROOM_BYTES if vm.waits_for_room else _ROOM_BYTES + reserve_bytes(parts)
                await make_room(parts, room_bytes)
                if use(parts).free_bytes < room_bytes and sandbox.purpose == "build":
                    await end(parts, sandbox, "the node's disk is full: free some space, then build again")
                    return
                if sandbox_id not in known:
                    known.add(sandbox_id)
                    await note(parts, sandbox_id, "stands still: the node's disk is full; it goes on when there is room", "error")
                if is_kept or use(parts).free_bytes < room_bytes:
                    return
                await vm.resume()
            elif sandbox_id not in known:
                return
        except AgentEnvError as error:
            await note(parts, sandbox_id, "could not be asked whether it stands still", "warn", cause=str(error))
            return
    known.discard(sandbox_id)
    await note(parts, sandbox_id, "goes on: there is room on the node's disk again")
