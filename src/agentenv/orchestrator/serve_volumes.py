"""Serve volumes: the volume server of a sandbox that mounts any lives as long as its VM.

A volume that was deleted since the sandbox was made is served no more, but a server there is: whoever still has the volume
mounted must be told that it is stale, and not wait for ever.
"""

from __future__ import annotations

from agentenv.core.model import Sandbox, Volume
from agentenv.network.layout import Slot
from agentenv.orchestrator.parts import Parts, note
from agentenv.volume.server import nfs_target

Mounts = tuple[tuple[str, str], ...]  # NFS target, path


def life(sandbox_id: str, run_id: str) -> str:
    """Names one life of a sandbox's VM to the volume servers."""
    return f"{sandbox_id}-{run_id}"


async def serve(parts: Parts, sandbox: Sandbox, run_id: str, slot: Slot) -> Mounts:
    """Have the sandbox's volumes served; returns what its guest is to mount and where, outer paths first."""
    if not sandbox.volume_mounts:
        return ()
    volumes = _existing(parts, sandbox)
    await parts.volume_servers.ensure(life(sandbox.sandbox_id, run_id), slot.namespace, list(volumes.values()))
    mounts = sorted(sandbox.volume_mounts, key=lambda mount: mount.path)
    return tuple((nfs_target(mount.volume_id), mount.path) for mount in mounts if mount.volume_id in volumes)


async def look_after(parts: Parts, sandbox: Sandbox) -> None:
    """Start the server of a running sandbox again if it has died. The caller holds the sandbox's lock."""
    if sandbox.vm is None or not sandbox.volume_mounts:
        return
    volumes = _existing(parts, sandbox)
    namespace = parts.slots.slot(sandbox.vm.slot).namespace
    if await parts.volume_servers.ensure(life(sandbox.sandbox_id, sandbox.vm.run_id), namespace, list(volumes.values())):
        await note(parts, sandbox.sandbox_id, "its volume server had ended and runs again", "warn")


def _existing(parts: Parts, sandbox: Sandbox) -> dict[str, Volume]:
    known = {volume.volume_id: volume for volume in parts.volumes.all()} if sandbox.volume_mounts else {}
    return {mount.volume_id: known[mount.volume_id] for mount in sandbox.volume_mounts if mount.volume_id in known}
