"""The tasks that keep a node in order while its server runs."""

from __future__ import annotations

import asyncio

from agentenv.orchestrator import block_watch, collect, disk_watch, evict, heal, helper_logins, memory_watch, sample, verify, warm
from agentenv.orchestrator.parts import Parts

_KEEPERS = (block_watch, memory_watch, disk_watch, evict, heal, sample, collect, warm, helper_logins)


def start(parts: Parts, mender: verify.Mender) -> list[asyncio.Task[None]]:
    """Start them all; they are the caller's to cancel."""
    tasks = [asyncio.create_task(keeper.run(parts), name=keeper.__name__) for keeper in _KEEPERS]
    return [*tasks, asyncio.create_task(verify.run(parts, mender), name=verify.__name__)]
