"""Disk watch: a guest whose VMM would pass a full disk of the host on to it as an I/O error stands still before there is one.

QEMU keeps a write that finds no room, and stops its VM (see `heal`). Firecracker fails it in the guest, whose file system may then
refuse all writes. So below `limits.disk_reserve_mb` caches give way first, then each such VM whose disk has grown since the last look
is stopped; `heal` lets it go on when there is room. This is a look every quarter of a second and no lock on the disk: who writes more
than the reserve in that time meets the error where disks are files. Of a device the block server keeps the write; until there is room
its VMM may answer nobody, which is why VMs are stopped before all the same.
"""

from __future__ import annotations

import logging

from agentenv.core.errors import AgentEnvError
from agentenv.core.lifecycle import State
from agentenv.core.model import Sandbox
from agentenv.orchestrator.collect import make_room, use
from agentenv.orchestrator.parts import Parts, note

_log = logging.getLogger(__name__)
_NAME = "disk"
_INTERVAL_MS, _NEAR_INTERVAL_MS = 2_000, 250
_NEAR = 4  # times the reserve: from there on it is looked at often, and who writes is known


async def run(parts: Parts) -> None:
    """Watch until cancelled."""
    sizes: dict[str, int] = {}
    while True:
        is_near = use(parts).free_bytes < _NEAR * reserve_bytes(parts)
        try:
            sizes = await look(parts, sizes) if is_near else {}
            _tell(parts)
        except Exception as error:  # noqa: BLE001 - a fault met with one sandbox must not end the care for all
            _log.error("looking after the node's disk failed: %s", error, exc_info=not isinstance(error, AgentEnvError))
        await parts.clock.sleep_ms(_NEAR_INTERVAL_MS if is_near else _INTERVAL_MS)


def reserve_bytes(parts: Parts) -> int:
    """What stays free: creates and pauses are refused below it, too."""
    return parts.config.limits.disk_reserve_mb << 20


async def look(parts: Parts, before: dict[str, int]) -> dict[str, int]:
    """Stop those that write, if there is no room; what each disk's layer holds now, for the next look."""
    stacks = await parts.blocks.stacks()
    sizes = {stack.stack_id: stack.upper_data_bytes for stack in stacks if stack.upper is not None and not stack.waits_for_room}
    await make_room(parts)
    if use(parts).free_bytes < reserve_bytes(parts):
        for sandbox in parts.store.sandboxes():
            if sandbox.vm is not None and sizes.get(sandbox.vm.disk_stack, 0) > before.get(sandbox.vm.disk_stack, 1 << 62):
                await _stop(parts, sandbox)
    return sizes


async def _stop(parts: Parts, sandbox: Sandbox) -> None:
    """Unless a verb is at work with it, which does not last; then the next look does."""
    sandbox_id = sandbox.sandbox_id
    if parts.shared.is_locked(sandbox_id):
        return
    async with parts.shared.locked(sandbox_id):
        vm, current = parts.shared.vms.get(sandbox_id), parts.store.sandbox(sandbox_id)
        if vm is None or vm.waits_for_room or current is None or current.state is not State.RUNNING or await vm.stalled():
            return
        try:
            await vm.pause()  # `heal` notes it
        except AgentEnvError as error:
            await note(parts, sandbox_id, "could not be stopped before the node's disk is full", "warn", cause=str(error))


def _tell(parts: Parts) -> None:
    """In `/health`: that there is no room."""
    free_bytes = use(parts).free_bytes
    if free_bytes < reserve_bytes(parts):
        said = f"the node's disk has {free_bytes >> 20} MiB left, less than limits.disk_reserve_mb: creates and pauses are refused"
        parts.shared.troubles[_NAME] = said
    else:
        parts.shared.troubles.pop(_NAME, None)
