"""Verify: read layers whole and compare them with their checksums; make those anew that are damaged and can be had again.

On demand, and in the background at a low rate, the layer first that was looked at longest ago. A damaged one is named, and no sandbox
starts from it any more; what runs on it goes on as long as it can.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass
from typing import Literal, Protocol

from agentenv.core.errors import AgentEnvError, NotFound
from agentenv.image import native
from agentenv.orchestrator.layer_uses import layer_uses
from agentenv.orchestrator.parts import Parts

_log = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 20
_YOUNG_S = 3600.0  # most layers of sandboxes live no longer
_IDLE_MS = 10 * 60_000  # between looks whether a layer's turn has come
State = Literal["intact", "noted", "remote", "written", "damaged", "mended"]


class Mender(Protocol):
    """Who can have layers of images again."""

    async def mend(self, layer_id: str) -> str:
        """Make a layer anew; returns the image it is of. AgentEnvError when that cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class Verified:
    """What a look has found. `noted`: it was the first one; `remote`: not here yet; `written`: a sandbox still writes it."""

    layer_id: str
    state: State
    told: str
    users: tuple[str, ...] = ()


async def run(parts: Parts, mender: Mender) -> None:
    """Look at one layer after the other until cancelled."""
    storage = parts.config.storage
    while True:
        try:
            layer_id = await asyncio.to_thread(_next, parts, storage.verify_days) if storage.verify_mb_per_s else None
            if layer_id is not None:
                await verify(parts, mender, layer_id, storage.verify_mb_per_s << 20)
                continue
        except NotFound:
            continue  # it went meanwhile
        except Exception:  # noqa: BLE001 - whatever it is, the next look must come
            _log.exception("verifying a layer failed, will be tried again")
        await parts.clock.sleep_ms(_IDLE_MS)


async def verify(parts: Parts, mender: Mender, layer_id: str, bytes_per_s: int = 0) -> Verified:
    """Read a layer and compare it; 0 reads as fast as it goes. NotFound when there is none of that name."""
    path = parts.layers.path(layer_id)
    if "/" in layer_id or not await asyncio.to_thread(path.exists):
        raise NotFound(f"there is no layer {layer_id[:100]!r}", "`aenv layers` lists those there are")
    if _is_written(parts, layer_id):
        return Verified(layer_id, "written", "it is still written")
    if native.is_native(layer_id) and await asyncio.to_thread(native.blob_of, path) is not None:
        return Verified(layer_id, "remote", "it is in its registry: its blocks are compared as they are read")
    found = await _sha256(parts, layer_id, bytes_per_s)
    noted = await asyncio.to_thread(parts.layers.digests.get, layer_id)
    expected = native.digest_prefix(layer_id) or (noted.sha256 if noted is not None else "")
    if not expected or found.startswith(expected):
        await asyncio.to_thread(parts.layers.digests.put, layer_id, found)
        return Verified(layer_id, "intact" if expected else "noted", f"sha256:{found}")
    return await _damaged(parts, mender, layer_id, noted.sha256 if noted is not None else expected.ljust(64, "0"), found)


async def _damaged(parts: Parts, mender: Mender, layer_id: str, expected: str, found: str) -> Verified:
    await asyncio.to_thread(parts.layers.digests.put, layer_id, expected, is_damaged=True)
    users = next((use.users for use in await layer_uses(parts) if use.layer_id == layer_id), ())
    told = f"{parts.layers.path(layer_id)} is damaged: it has the checksum {found}, not {expected.rstrip('0') or expected}"
    _log.error("layer %s of %s: %s", layer_id, ", ".join(users) or "nothing", told)
    try:
        image = await mender.mend(layer_id)
        again = await _sha256(parts, layer_id, 0)
        if not again.startswith(native.digest_prefix(layer_id) or expected):
            return Verified(layer_id, "damaged", f"{told}; what {image} gave is not the same either", users)
    except AgentEnvError as error:
        return Verified(layer_id, "damaged", f"{told}; it cannot be had again: {error.message}", users)
    await asyncio.to_thread(parts.layers.digests.put, layer_id, again)
    _log.warning("layer %s was made anew from %s", layer_id, image)
    return Verified(layer_id, "mended", f"{told}; it was made anew from {image}", users)


async def _sha256(parts: Parts, layer_id: str, bytes_per_s: int) -> str:
    digest, done, began_s = hashlib.sha256(), 0, time.monotonic()
    buffer = memoryview(bytearray(_PIECE_BYTES))  # one for all: each thread that allocated pieces would keep the room of one
    try:
        with parts.layers.path(layer_id).open("rb", buffering=0) as file:

            def read() -> int:
                count = file.readinto(buffer)
                digest.update(buffer[:count])
                return count

            while count := await asyncio.to_thread(read):
                done += count
                if bytes_per_s and (ahead_s := done / bytes_per_s - (time.monotonic() - began_s)) > 0:
                    await asyncio.sleep(ahead_s)
    except FileNotFoundError as error:
        raise NotFound(f"layer {layer_id} went while it was read") from error
    return digest.hexdigest()


def _next(parts: Parts, days: int) -> str | None:
    """The layer that was looked at longest ago, if that is long enough ago."""
    oldest_s = time.time() - days * 86_400
    looks = dict[str, float]()
    for layer_id in parts.layers.sizes():
        if not _has_come_of_age(parts, layer_id):
            continue
        noted = parts.layers.digests.get(layer_id)
        looks[layer_id] = noted.looked_at_s if noted is not None else 0.0
    layer_id, looked_at_s = min(looks.items(), key=lambda look: look[1], default=("", oldest_s))
    return layer_id if looked_at_s < oldest_s else None


def _has_come_of_age(parts: Parts, layer_id: str) -> bool:
    """Whether a layer is all here, is written no more, and has been for a while."""
    path = parts.layers.path(layer_id)
    if not path.exists() or _is_written(parts, layer_id):
        return False
    if native.is_native(layer_id) and native.place_of(path) is not None:
        return False
    return path.stat().st_mtime <= time.time() - _YOUNG_S


def _is_written(parts: Parts, layer_id: str) -> bool:
    return parts.layers.upper(layer_id).index.exists() or parts.layers.is_announced(layer_id)
