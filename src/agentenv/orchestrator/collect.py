"""Collect: free what nothing reaches, and when the node's disk gets full also what only makes later work faster, coldest first.

Caches are bounded each by itself; beyond that they give way above `storage.high_percent`, until `storage.low_percent`. What a
sandbox, a template, a snapshot or a verb under way reaches never goes; images on record do if `storage.images_unused_days` says so.
Each thing goes by one step that is whole or not done: a file by its removal, a cached build step or an image by that of its row,
after which its layers are the sweep's. So a collection that is killed half-way is simply done again.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from agentenv.core.builds import CachedStep
from agentenv.core.errors import AgentEnvError, StorageFull
from agentenv.core.images import Image
from agentenv.core.storage import CacheItem, Collection, DiskUse
from agentenv.host.file_cache import FileCache
from agentenv.orchestrator.old_assets import old_assets, remove_assets
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.sweep import referenced, served, sweep, wanted_snapshots

_log = logging.getLogger(__name__)
_INTERVAL_MS = 30_000  # a build writes some GiB in that time
Goal = Callable[[DiskUse], int]


async def run(parts: Parts) -> None:
    """Look after the disk until cancelled: that it does not get full, and that what lies there for a while would survive a crash."""
    while True:
        try:
            await asyncio.to_thread(parts.layers.write_out, _INTERVAL_MS / 1000)
            if use(parts).percent > parts.config.storage.high_percent:
                await collect(parts)
        except Exception:  # noqa: BLE001 - whatever it is, the next look must come
            _log.exception("looking after the node's disk failed, will be tried again")
        await parts.clock.sleep_ms(_INTERVAL_MS)


def use(parts: Parts) -> DiskUse:
    """How full the node's disk is; the fuller one, where an operator has put layers on a disk of their own."""
    return max(map(parts.disk_use, (parts.paths.home, parts.paths.layers)), key=lambda disk: disk.percent)


async def make_room(parts: Parts, least_bytes: int = 0) -> None:
    """Let caches give way if less than `limits.disk_reserve_mb`, or `least_bytes`, is free.

    Never fails: who needs room looks whether there is some now.
    """
    reserve_bytes = max(parts.config.limits.disk_reserve_mb << 20, least_bytes)
    if use(parts).free_bytes >= reserve_bytes:
        return
    try:
        await collect(parts, lambda disk: max(_down_to_low(parts, disk), reserve_bytes - disk.free_bytes))
    except AgentEnvError as error:
        _log.error("no room could be made on the node's disk: %s", error)


async def collect(parts: Parts, goal: Goal | None = None, *, dry_run: bool = False) -> Collection:
    """Free what nothing reaches; then let caches give up as many bytes as `goal` says of the disk as it is then.

    Without a goal they do until `storage.low_percent` is used. A dry run changes nothing and tells what would go.
    """
    async with parts.shared.collecting:
        freed = await _unreached_bytes(parts) if dry_run else await sweep(parts)
        old = await old_assets(parts)
        old = old if dry_run else await remove_assets(parts, old)
        freed += sum(item.size_bytes for item in old)
        disk = use(parts)
        if dry_run:
            disk = DiskUse(max(0, disk.used_bytes - freed), disk.free_bytes + freed)
        wanted = _down_to_low(parts, disk) if goal is None else goal(disk)
        plan = await _plan(parts, wanted)
        left = wanted - sum(one.item.size_bytes for one in plan)
        if left > 0:  # blocks of layers in registries are many and small: blockd knows which of them are cold
            freed += await parts.blocks.shrink_cache(left, dry_run)
        if dry_run:
            return Collection(freed + sum(one.item.size_bytes for one in plan), (*old, *(one.item for one in plan)), use(parts))
        evicted = await _evict(parts, plan)
        freed += sum(one.item.size_bytes for one in evicted if isinstance(one.source, FileCache))
        if evicted:
            freed += await sweep(parts)
            _log.warning("the disk was %.0f%% full: %d things went from caches, %d MiB in all", disk.percent, len(evicted), freed >> 20)
        return Collection(freed, (*old, *(one.item for one in evicted)), use(parts))


def everything(_disk: DiskUse) -> int:
    """The goal of emptying all caches."""
    return sys.maxsize


def _down_to_low(parts: Parts, disk: DiskUse) -> int:
    return disk.over_bytes(parts.config.storage.low_percent)


@dataclass(frozen=True, slots=True)
class _Eviction:
    """A thing that is to go, and the cache that has it."""

    item: CacheItem
    source: FileCache | CachedStep | Image


async def _plan(parts: Parts, goal_bytes: int) -> list[_Eviction]:
    """What to give up, coldest first, until it makes `goal_bytes`."""
    if goal_bytes <= 0:
        return []
    found = [*await _cold_steps(parts), *await _cold_images(parts)]
    for cache in parts.shared.file_caches:
        found += [_Eviction(item, cache) for item in await asyncio.to_thread(cache.cold)]
    plan, left = [], goal_bytes
    for one in sorted(found, key=lambda one: one.item.used_at_ms):
        if left <= 0:
            break
        plan.append(one)
        left -= one.item.size_bytes
    return plan


async def _cold_steps(parts: Parts) -> list[_Eviction]:
    """The cached steps that nothing uses, coldest first, each with what its going frees once the colder ones are gone."""
    sizes = await asyncio.to_thread(parts.layers.sizes)
    open_layers = await served(parts)
    wanted = wanted_snapshots(parts)
    snapshots = {snapshot.snapshot_id: snapshot for snapshot in parts.store.snapshots()}
    steps = sorted((step for step in parts.store.cached_steps.all() if step.snapshot_id not in wanted), key=lambda step: step.used_at_ms)
    layers = {step.key: set(snapshots[step.snapshot_id].disk_layers) for step in steps if step.snapshot_id in snapshots}
    kept = open_layers | referenced(parts, leaving_out=snapshots.keys() - wanted)
    users = Counter(layer for named in layers.values() for layer in named if layer not in kept and not parts.layers.is_announced(layer))
    found = []
    for step in steps:
        own = [layer for layer in layers.get(step.key, ()) if users[layer] == 1]
        users.subtract(layers.get(step.key, ()))
        size_bytes = sum(sizes.get(layer, 0) for layer in own)
        found.append(_Eviction(CacheItem("build step", step.key, step.used_at_ms, size_bytes), step))
    return found


async def _cold_images(parts: Parts) -> list[_Eviction]:
    """Images that nothing uses and that can be pulled again, if a setting gives them up after some days; each with what it alone has."""
    days = parts.config.storage.images_unused_days
    if days == 0:
        return []
    sizes = await asyncio.to_thread(parts.layers.sizes)
    oldest_ms = parts.clock.now_ms() - days * 24 * 3_600_000
    images = parts.store.images.all()
    kept = await served(parts) | referenced(parts, leaving_out={image.snapshot_id for image in images}, images=False)
    users = Counter(layer for image in images for layer in set(image.layer_ids) - kept)
    found = []
    for image in images:
        own = [layer for layer in set(image.layer_ids) if users[layer] == 1 and not parts.layers.is_announced(layer)]
        is_used = image.imported or image.used_at_ms > oldest_ms or image.snapshot_id in parts.shared.snapshots_in_use
        if not is_used and image.layer_ids[-1] not in kept:
            size_bytes = sum(sizes.get(layer, 0) for layer in own)
            found.append(_Eviction(CacheItem("image", image.names[0], image.used_at_ms, size_bytes), image))
    return found


async def _evict(parts: Parts, plan: list[_Eviction]) -> list[_Eviction]:
    """Carry a plan out; what has been used meanwhile stays. Rows that a full disk has no room to change are tried again at the end."""
    done, again = [], []
    for one in plan:
        try:
            if await _evict_one(parts, one):
                done.append(one)
        except StorageFull:
            again.append(one)
    return done + [one for one in again if await _evict_one(parts, one)]


async def _evict_one(parts: Parts, one: _Eviction) -> bool:
    if isinstance(one.source, FileCache):
        return await asyncio.to_thread(one.source.evict, one.item)
    if isinstance(one.source, Image):
        image = one.source
        if parts.store.images.get(image.digest) != image or image.snapshot_id in parts.shared.snapshots_in_use:
            return False
        await parts.store.images.remove(image.digest)
        return True
    if parts.store.cached_steps.get(one.source.key) != one.source or one.source.snapshot_id in parts.shared.snapshots_in_use:
        return False
    await parts.store.cached_steps.remove(one.source.key)
    return True


async def _unreached_bytes(parts: Parts) -> int:
    """What a sweep would free, without one: of snapshots nobody wants, the layers count as unreached."""
    sizes = await asyncio.to_thread(parts.layers.sizes)
    open_layers = await served(parts)
    wanted = wanted_snapshots(parts) | {step.snapshot_id for step in parts.store.cached_steps.all()}
    unwanted = {snapshot.snapshot_id for snapshot in parts.store.snapshots()} - wanted
    reached = open_layers | referenced(parts, leaving_out=unwanted)
    return sum(size for layer, size in sizes.items() if layer not in reached and not parts.layers.is_announced(layer))
