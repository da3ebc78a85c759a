"""Which layers a node has, what they take on its disk, and what reaches each of them. Only looks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agentenv.core.lifecycle import State
from agentenv.orchestrator.parts import Parts


@dataclass(frozen=True, slots=True)
class LayerUse:
    """One layer. Each user is `<kind> <name>`, of an image, template, sandbox, checkpoint or build step.

    The next sweep takes one that has none.
    """

    layer_id: str
    size_bytes: int
    users: tuple[str, ...]


async def layer_uses(parts: Parts) -> list[LayerUse]:
    """Every layer of the store, the largest first."""
    users: dict[str, dict[str, None]] = defaultdict(dict)
    for user, layers in _named(parts):
        for layer_id in layers:
            users[layer_id][user] = None
    sizes = await asyncio.to_thread(parts.layers.sizes)
    found = [LayerUse(layer_id, size_bytes, tuple(users[layer_id])) for layer_id, size_bytes in sizes.items()]
    return sorted(found, key=lambda layer: (-layer.size_bytes, layer.layer_id))


def _named(parts: Parts) -> Iterator[tuple[str, Iterable[str]]]:
    store = parts.store
    snapshots = {s.snapshot_id: (*s.memory_layers, *s.disk_layers) for s in store.snapshots()}
    for image in store.images.all():
        yield f"image {image.names[0]}", image.layer_ids
    for template in store.templates():
        for build in template.builds:
            yield f"template {template.name}", snapshots.get(build.snapshot_id, ())
    for sandbox in store.sandboxes():
        if sandbox.state is State.KILLED:
            continue
        yield f"sandbox {sandbox.sandbox_id}", snapshots.get(sandbox.snapshot_id or "", ())
        if (vm := sandbox.vm) is not None:
            yield f"sandbox {sandbox.sandbox_id}", vm.layer_ids
    for kept in store.checkpoints.all():
        yield f"checkpoint of {kept.sandbox_id}", snapshots.get(kept.snapshot_id, ())
    for step in store.cached_steps.all():
        yield f"build step {step.key[:12]}", snapshots.get(step.snapshot_id, ())
