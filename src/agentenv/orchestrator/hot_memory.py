"""The memory that the next creates start from, open and in the page cache before the first of them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from agentenv.host import files
from agentenv.orchestrator.admission import available_memory_mb
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.start import memory_stack_id, open_memory
from agentenv.orchestrator.templates import hot_snapshot_ids

_log = logging.getLogger(__name__)


async def open_hot_memory(parts: Parts) -> None:
    """Open the memory of the hot snapshots; it is read in the background, so that the first create is as quick as any."""
    for snapshot_id in hot_snapshot_ids(parts.store):
        layers = parts.store.snapshot(snapshot_id).memory_layers
        if not layers:
            continue  # what starts from it boots
        stack_id = memory_stack_id(layers)
        async with parts.shared.locked(stack_id):  # the sweep closes it under the same lock
            stack = await open_memory(parts, stack_id, layers)
        budget_bytes = (available_memory_mb(parts) << 20) // 8  # clean pages: the kernel drops them when memory gets tight
        parts.shared.background(asyncio.to_thread(_warm, stack.path, budget_bytes), f"warm {snapshot_id}")


def _warm(path: Path, budget_bytes: int) -> None:
    try:
        files.warm(path, budget_bytes)
    except OSError as error:  # it was closed, or blockd has ended
        _log.warning("%s could not be read ahead: %s", path.name, error)
