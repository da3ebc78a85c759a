"""Publishes a template's root file system as an image in a registry. What runs in its memory stays behind: an image is a disk."""

from __future__ import annotations

from agentenv.core.builds import Registry
from agentenv.core.clock import rfc3339
from agentenv.host.command import Progress, no_progress
from agentenv.image import accounts, reference
from agentenv.image.push import Disk, Pushed
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.templates import resolve


async def publish(parts: Parts, template: str, name: str, account: Registry | None = None, progress: Progress = no_progress) -> Pushed:
    """Push the disk of a build that `template` names as the image `name`. `progress` may be called on any thread.

    NotFound, InvalidInput, PermissionDenied, Unavailable, StorageFull, HostNotReady, DeadlineExceeded.
    """
    _, build = resolve(parts.store, template)
    credentials = await accounts.login(account, reference.parse(name, parts.config.images.default_registry).registry)
    with parts.shared.using(build.snapshot_id):
        layers = parts.store.snapshot(build.snapshot_id).disk_layers
        return await parts.image_publisher.push(Disk(layers, build.context, rfc3339(build.created_at_ms)), name, credentials, progress)
