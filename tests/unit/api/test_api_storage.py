"""Freeing space over the wire and by `aenv gc`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentenv.testing.fake_orchestrator import FakeOrchestrator


@pytest.fixture
def upload(orchestrator: FakeOrchestrator) -> Path:
    path = orchestrator.builds.files.cache.folder / ("a" * 64)
    path.write_bytes(b"x" * 5000)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


async def collected(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post("/storage/collect", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def test_what_goes_is_told_beforehand_and_then_goes(client: httpx.AsyncClient, upload: Path):
    item = {"kind": "build upload", "name": upload.name, "usedAt": "2023-11-14T22:13:20.000Z", "sizeBytes": 5000}
    disk = {"usedBytes": 1 << 30, "freeBytes": 1 << 30}
    assert await collected(client) == {"freedBytes": 0, "evicted": [], "disk": disk}
    for dry_run in (True, False):
        assert upload.exists()
        told = await collected(client, everything=True, dryRun=dry_run)
        assert told == {"freedBytes": 5000, "evicted": [item], "disk": disk}
    assert not upload.exists()
    assert (await collected(client, everything=True))["freedBytes"] == 0


@pytest.mark.parametrize("body", [{"everything": "yes"}, {"dryRun": 1}, []])
async def test_a_body_that_is_none(client: httpx.AsyncClient, upload: Path, body: Any):
    assert (await client.post("/storage/collect", json=body)).status_code == 400
    assert upload.exists()


async def test_a_stranger_frees_nothing(stranger: httpx.AsyncClient, upload: Path):
    assert (await stranger.post("/storage/collect", json={"everything": True})).status_code == 401
    assert upload.exists()
