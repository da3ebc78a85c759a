"""Kernels, initramfs, QEMUs and root file systems of earlier versions: which of them nothing needs any more.

Kept is what this node starts VMs with, what a snapshot was made with, what a built-in template is built on, what a process of
the machine uses, and whatever was made within the last hour.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from agentenv.core.errors import AgentEnvError
from agentenv.core.storage import CacheItem
from agentenv.host.asset_cache import Asset, AssetCache
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.sweep import referenced
from agentenv.template.base import base_layer
from agentenv.template.recipes import RECIPES

_YOUNG_S = 3600.0  # `aenv up` makes what it needs before its server is there


async def old_assets(parts: Parts) -> list[CacheItem]:
    """What may go, the oldest first."""
    layers = referenced(parts)
    identities = [parts.identity, *(snapshot.identity for snapshot in parts.store.snapshots())]
    checksums = {name for one in identities for name in (one.kernel_sha256, one.initramfs_sha256)}
    versions = {one.vmm_version for one in identities}
    now_s = time.time()

    def find() -> list[CacheItem]:
        cache = AssetCache(parts.paths.cache)
        items: list[tuple[Path, CacheItem]] = []
        for path, made_at_s, size_bytes in cache.listed():
            is_booted = any(used.is_relative_to(path) for used in (parts.boot.kernel, parts.boot.initramfs))
            is_young = made_at_s > now_s - _YOUNG_S
            if is_booted or is_young or _is_reached(path, cache.find(path.name), checksums, versions, layers):
                continue
            items.append((path, CacheItem("old asset", path.name, round(1000 * made_at_s), size_bytes)))
        commands = list(_commands()) if items else []  # every process of the machine: only if something would go
        unused = [item for path, item in items if not any(f"{path}/".encode() in command for command in commands)]
        return sorted(unused, key=lambda item: item.used_at_ms)

    return await asyncio.to_thread(find)


async def remove_assets(parts: Parts, items: list[CacheItem]) -> list[CacheItem]:
    """Remove them; returns those that went. One that somebody is making again stays."""
    gone = []
    for item in items:
        try:
            await asyncio.to_thread(AssetCache(parts.paths.cache).remove, item.name)
        except AgentEnvError:
            continue
        gone.append(item)
    return gone


def _is_reached(path: Path, asset: Asset | None, checksums: set[str], versions: set[str], layers: set[str]) -> bool:
    kind, _, digest = path.name.partition("-")
    if kind == "rootfs":
        return any(base_layer(recipe, digest) in layers for recipe in RECIPES.values())
    if asset is None:
        return False  # damaged: it would be made again before anybody uses it
    if kind == "qemu":
        return asset.facts.get("version") in versions
    return kind not in ("kernel", "initramfs") or not checksums.isdisjoint(asset.checksums.values())


def _commands() -> Iterator[bytes]:
    """The command lines of all processes: a VM of an earlier version of this node names what it runs with."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
