"""Evict: what happens when a sandbox's time is up, by its own policy. One task watches all of them."""

from __future__ import annotations

import asyncio
import logging

from agentenv.core.errors import AgentEnvError, Conflict, NotFound
from agentenv.core.lifecycle import State
from agentenv.core.model import Sandbox
from agentenv.orchestrator import delete
from agentenv.orchestrator.parts import Parts, note
from agentenv.orchestrator.pause import pause

_log = logging.getLogger(__name__)
_LONGEST_SLEEP_MS = 5_000  # the wall clock may be stepped while we sleep
_RETRY_MS = 10_000  # a pause that failed (disk full) is tried again; the sandbox runs on meanwhile


async def run(parts: Parts) -> None:
    """Expire sandboxes until cancelled."""
    while True:
        parts.shared.expiry_changed.clear()
        now_ms = parts.clock.now_ms()
        due, next_ms = _due(parts, now_ms)
        for sandbox in due:
            parts.shared.expiring.add(sandbox.sandbox_id)
            parts.shared.background(_expire_once(parts, sandbox), f"expire {sandbox.sandbox_id}")
        await _forget_old(parts, now_ms)
        wait_ms = min(_LONGEST_SLEEP_MS, max(0, next_ms - now_ms))
        sleep = asyncio.create_task(parts.clock.sleep_ms(wait_ms))
        changed = asyncio.create_task(parts.shared.expiry_changed.wait())
        await asyncio.wait({sleep, changed}, return_when=asyncio.FIRST_COMPLETED)
        sleep.cancel()
        changed.cancel()


def _due(parts: Parts, now_ms: int) -> tuple[list[Sandbox], int]:
    """Who is due, and when the next one is."""
    due, next_ms = [], now_ms + _LONGEST_SLEEP_MS
    for sandbox in parts.store.sandboxes():
        if sandbox.state is not State.RUNNING or sandbox.sandbox_id in parts.shared.expiring:
            continue
        if sandbox.end_at_ms <= now_ms:
            due.append(sandbox)
        else:
            next_ms = min(next_ms, sandbox.end_at_ms)
    return due, next_ms


async def _expire_once(parts: Parts, sandbox: Sandbox) -> None:
    try:
        await expire(parts, sandbox.sandbox_id)
    finally:
        parts.shared.expiring.discard(sandbox.sandbox_id)
        parts.shared.expiry_changed.set()


async def expire(parts: Parts, sandbox_id: str) -> None:
    """Apply the policy of a sandbox if its time is (still) up."""
    sandbox = parts.store.sandbox(sandbox_id)
    if sandbox is None or sandbox.state is not State.RUNNING or sandbox.end_at_ms > parts.clock.now_ms():
        return
    try:
        if sandbox.on_timeout == "pause":
            await pause(parts, sandbox_id)
        else:
            await _kill(parts, sandbox_id)
    except (Conflict, NotFound):
        return  # someone else was quicker
    except AgentEnvError as error:
        await note(parts, sandbox_id, "could not be paused at its timeout, will be tried again", "error", cause=str(error))
        await parts.clock.sleep_ms(_RETRY_MS)


async def _kill(parts: Parts, sandbox_id: str) -> None:
    async with parts.shared.locked(sandbox_id):
        sandbox = parts.store.sandbox(sandbox_id)
        if sandbox is None or sandbox.state is not State.RUNNING or sandbox.end_at_ms > parts.clock.now_ms():
            return  # extended while we waited for our turn
        await delete.end(parts, sandbox, "its timeout was reached")


async def _forget_old(parts: Parts, now_ms: int) -> None:
    kept_ms = 1000 * parts.config.limits.killed_kept_s
    for sandbox in parts.store.sandboxes():
        if sandbox.state is State.KILLED and sandbox.updated_at_ms + kept_ms < now_ms:
            await parts.store.forget_sandbox(sandbox.sandbox_id)
