"""A disk with nothing on it, for FROM scratch: made once, held as long as a build needs it, gone with the next sweep."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.config.schema import Config, GuestConfig, LimitsConfig
from agentenv.core.model import Context
from agentenv.testing.fake_node import FakeNode


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode(tmp_path / "node")
    node.config = Config(guest=GuestConfig(disk_mb=1024), limits=LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=0))
    await node.start_server()
    yield node
    await node.close()


async def test_it_is_the_layer_that_all_images_begin_with(node: FakeNode):
    images, parts = node.orchestrator.images, node.parts
    first = await images.empty()
    with parts.shared.using(first.snapshot_id):
        snapshot = parts.store.snapshot(first.snapshot_id)
        assert list(snapshot.disk_layers) == parts.image_converter.planned(())
        assert (snapshot.has_memory, first.context, first.image) == (False, Context("root", "/"), None)
        made_ns = parts.layers.path(snapshot.disk_layers[0]).stat().st_mtime_ns
        second = await images.empty()
        assert second.origin == first.origin, "steps on it are found in the cache"
        assert parts.layers.path(snapshot.disk_layers[0]).stat().st_mtime_ns == made_ns
        await node.quiesce()
        assert parts.layers.path(snapshot.disk_layers[0]).exists(), "a build may hold it"
    await node.quiesce()
    assert node.problems() == []
