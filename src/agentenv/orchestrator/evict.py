"""Evict: what happens when a sandbox's time is up, by its own policy. One task watches all of them."""

from __future__ import annotations

import asyncio
import logging

from agentenv.core.errors import AgentEnvError, Unavailable
from agentenv.core.lifecycle import State
from agentenv.core.model import Sandbox
from agentenv.orchestrator import delete
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.pause import pause_held
from agentenv.orchestrator.repair import repair

_log = logging.getLogger(__name__)
_LONGEST_SLEEP_MS = 5_000  # the wall clock may be stepped while we sleep
_RETRY_MS = 10_000  # a pause that failed (disk full) is tried again; the sandbox runs on meanwhile


async def run(parts: Parts) -> None:
    """Expire sandboxes, and settle what others left, until cancelled."""
    while True:
        wait_ms = _LONGEST_SLEEP_MS
        try:
            wait_ms = await _round(parts)
        except Exception:  # noqa: BLE001 - a fault met with one sandbox must not end the timeouts of all others
            _log.exception("acting on timeouts failed, will be tried again")
        await _wait(parts, wait_ms)


async def _round(parts: Parts) -> int:
    """Look at every sandbox once; returns how long there is nothing to do, in ms."""
    parts.shared.expiry_changed.clear()
    now_ms = parts.clock.now_ms()
    due, next_ms = _due(parts, now_ms)
    for sandbox in due:
        parts.shared.expiring.add(sandbox.sandbox_id)
        parts.shared.background(_expire_once(parts, sandbox), f"expire {sandbox.sandbox_id}")
    await repair(parts)
    await _forget_old(parts, now_ms)
    return min(_LONGEST_SLEEP_MS, max(0, next_ms - now_ms))


async def _wait(parts: Parts, wait_ms: int) -> None:
    sleep = asyncio.create_task(parts.clock.sleep_ms(wait_ms))
    changed = asyncio.create_task(parts.shared.expiry_changed.wait())
    try:
        await asyncio.wait({sleep, changed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleep.cancel()
        changed.cancel()


def _due(parts: Parts, now_ms: int) -> tuple[list[Sandbox], int]:
    """Who is due, and when the next one is."""
    due, next_ms = [], now_ms + _LONGEST_SLEEP_MS
    for sandbox in parts.store.sandboxes():
        if sandbox.state is not State.RUNNING or sandbox.sandbox_id in parts.shared.expiring:
            continue
        due_at_ms = max(sandbox.end_at_ms, parts.shared.expiry_retry_at_ms.get(sandbox.sandbox_id, 0))
        if due_at_ms <= now_ms:
            due.append(sandbox)
        else:
            next_ms = min(next_ms, due_at_ms)
    return due, next_ms


async def _expire_once(parts: Parts, sandbox: Sandbox) -> None:
    """Expire, and after a failure leave the sandbox alone for a while."""
    try:
        await expire(parts, sandbox.sandbox_id)
        parts.shared.expiry_retry_at_ms.pop(sandbox.sandbox_id, None)
    except Exception as error:
        parts.shared.expiry_retry_at_ms[sandbox.sandbox_id] = parts.clock.now_ms() + _RETRY_MS
        await note(parts, sandbox.sandbox_id, "its timeout could not be acted on, will be tried again", "error", cause=str(error))
        raise  # the background's log has it too
    finally:
        parts.shared.expiring.discard(sandbox.sandbox_id)
        parts.shared.expiry_changed.set()


async def expire(parts: Parts, sandbox_id: str) -> None:
    """Apply the policy of a sandbox if, once its turn has come, it still runs and its time is still up."""
    async with parts.shared.locked(sandbox_id):
        sandbox = parts.store.sandbox(sandbox_id)
        if sandbox is None or sandbox.state is not State.RUNNING or sandbox.end_at_ms > parts.clock.now_ms():
            return  # ended, paused or extended while we waited for our turn
        if sandbox.on_timeout == "pause":
            await _auto_pause(parts, sandbox)
        else:
            await delete.end(parts, sandbox, "its timeout was reached")


async def _auto_pause(parts: Parts, sandbox: Sandbox) -> None:
    """Pause as the sandbox's policy says. A guest that does not answer cannot give its disk alone: all of it is kept then."""
    try:
        await pause_held(parts, sandbox.sandbox_id, sandbox.auto_pause_memory)
    except Unavailable as error:
        if sandbox.auto_pause_memory:
            raise
        await note(parts, sandbox.sandbox_id, "its disk alone could not be paused, memory is kept, too", "warn", cause=str(error))
        await pause_held(parts, sandbox.sandbox_id)


async def _forget_old(parts: Parts, now_ms: int) -> None:
    kept_ms = 1000 * parts.config.limits.killed_kept_s
    for sandbox in parts.store.sandboxes():
        if sandbox.state is State.KILLED and sandbox.updated_at_ms + kept_ms < now_ms:
            try:
                await parts.store.forget_sandbox(sandbox.sandbox_id)
                parts.shared.expiry_retry_at_ms.pop(sandbox.sandbox_id, None)
                parts.shared.metrics.pop(sandbox.sandbox_id, None)
            except AgentEnvError as error:
                _log.warning("the row of %s stays for now: %s", sandbox.sandbox_id, error)
                return
