"""The node's own disk: freeing what is not needed. Not part of the contract, which knows no disks of nodes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import Field
from typing_extensions import TypedDict

from agentenv.api.bodies import Body
from agentenv.api.context import Context
from agentenv.api.request_parts import json_body
from agentenv.core.clock import rfc3339
from agentenv.core.storage import CacheKind, Collection

router = APIRouter()


class CollectBody(Body):
    """`POST /storage/collect`."""

    everything: bool = False
    dry_run: bool = Field(False, alias="dryRun")


class EvictedView(TypedDict):
    """One thing that went from a cache. `sizeBytes` is what its going frees once those before it are gone."""

    kind: CacheKind
    name: str
    usedAt: str
    sizeBytes: int


class DiskView(TypedDict):
    """The file system with the node's home."""

    usedBytes: int
    freeBytes: int


class CollectionView(TypedDict):
    """What was freed, or would be; and the disk as it is now."""

    freedBytes: int
    evicted: list[EvictedView]
    disk: DiskView


@router.post("/storage/collect", response_model=None)
async def collect(context: Context, body: Annotated[CollectBody, Depends(json_body(CollectBody))]) -> CollectionView:
    """Free what nothing reaches, and of caches what was used longest ago until the node's low watermark, or all. `dryRun` only tells."""
    return _view(await context.orchestrator.collect(body.everything, body.dry_run))


def _view(done: Collection) -> CollectionView:
    return {
        "freedBytes": done.freed_bytes,
        "evicted": [
            {"kind": item.kind, "name": item.name, "usedAt": rfc3339(item.used_at_ms), "sizeBytes": item.size_bytes}
            for item in done.evicted
        ],
        "disk": {"usedBytes": done.disk.used_bytes, "freeBytes": done.disk.free_bytes},
    }
