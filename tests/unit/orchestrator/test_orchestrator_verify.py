"""Layers compared with their checksums: bit rot is found and named, nothing starts from it, and what a registry has is made anew."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from image_rig import Layout, folder, layer, member
from registry_rig import RealRegistry, real_registry

from agentenv.config.schema import Config, GuestConfig, ImagesConfig, LimitsConfig, StorageConfig
from agentenv.core.errors import DataCorrupt, NotFound
from agentenv.core.model import CreateRequest
from agentenv.orchestrator import verify
from agentenv.testing.fake_node import FakeNode

LAYERS = (layer(folder("etc"), member("etc/base", os.urandom(300_000))), layer(member("top", b"x" * 1000)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "plain") as registry:
        yield registry


@pytest.fixture
async def node(tmp_path: Path, place: RealRegistry) -> AsyncIterator[FakeNode]:
    node = FakeNode(tmp_path / "node")
    images = ImagesConfig(insecure_registries=(place.host,), docker_config=str(tmp_path / "none.json"), certs_dir=tmp_path / "certs")
    limits = LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=0)
    storage = StorageConfig(verify_mb_per_s=0)
    node.config = Config(images=images, guest=GuestConfig(disk_mb=1024), limits=limits, storage=storage)
    await node.start_server()
    yield node
    await node.close()


def flip(path: Path, at: int = 5) -> None:
    """One bit, and the file's times as they were: what a look at times and sizes does not find."""
    content, facts = bytearray(path.read_bytes()), path.stat()
    content[at % len(content)] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


async def pulled(node: FakeNode, place: RealRegistry, work: Path, name: str):
    layout = Layout.make(work / name.replace("/", "-"), LAYERS)
    return await node.orchestrator.images.pull(place.push(layout.folder, f"{name}:1"))


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_a_layer_of_an_image_is_made_anew(node: FakeNode, place: RealRegistry, tmp_path: Path, which: int):
    image = await pulled(node, place, tmp_path, f"rot/tool{which}")
    path = node.parts.layers.path(image.layer_ids[which])
    before = path.read_bytes()
    states = [(await node.orchestrator.verify_layer(layer_id)).state for layer_id in image.layer_ids]
    again = [(await node.orchestrator.verify_layer(layer_id)).state for layer_id in image.layer_ids]
    assert (set(states), set(again)) == ({"noted"}, {"intact"})
    flip(path, len(before) // 2)
    found = await node.orchestrator.verify_layer(image.layer_ids[which])
    assert (found.state, found.users) == ("mended", (f"image {image.names[0]}",)), found.told
    assert str(path) in found.told
    assert path.read_bytes() == before
    assert (await node.orchestrator.verify_layer(image.layer_ids[which])).state == "intact"
    await node.quiesce()
    assert node.problems() == []
    assert not list(path.parent.glob("*.aside"))


async def test_what_nobody_has_again_is_named_and_nothing_starts_from_it(node: FakeNode):
    parts = node.parts
    path = parts.layers.path("templatedisk")
    assert (await node.orchestrator.verify_layer("templatedisk")).state == "noted"
    sandbox = await node.orchestrator.create(CreateRequest("base"))
    await node.orchestrator.kill(sandbox.sandbox_id)
    flip(path)
    found = await node.orchestrator.verify_layer("templatedisk")
    assert (found.state, found.users) == ("damaged", ("template base",))
    assert "no image from a registry has it" in found.told
    assert hashlib.sha256(path.read_bytes()).hexdigest() in found.told
    with pytest.raises(DataCorrupt, match="another checksum"):
        await node.orchestrator.create(CreateRequest("base"))
    flip(path)
    assert (await node.orchestrator.verify_layer("templatedisk")).state == "intact", "a copy was put back"
    await node.orchestrator.create(CreateRequest("base"))


async def test_a_registry_that_does_not_answer_changes_nothing(node: FakeNode, tmp_path: Path):
    with real_registry(tmp_path / "registry") as place:
        registries = (place.host,)
        node.config = node.config.model_copy(update={"images": node.config.images.model_copy(update={"insecure_registries": registries})})
        await node.start_server()
        image = await pulled(node, place, tmp_path, "gone/tool")
        for layer_id in image.layer_ids:
            await node.orchestrator.verify_layer(layer_id)
    path = node.parts.layers.path(image.layer_ids[1])
    flip(path)
    damaged = path.read_bytes()
    found = await node.orchestrator.verify_layer(image.layer_ids[1])
    assert found.state == "damaged"
    assert path.read_bytes() == damaged
    assert (await node.orchestrator.verify_layer(image.layer_ids[1])).state == "damaged", "it is not taken for right at the next look"


async def test_what_is_no_layer(node: FakeNode):
    for name in ("none", "../node.db", "a/b"):
        with pytest.raises(NotFound):
            await node.orchestrator.verify_layer(name)


async def test_a_layer_that_is_written_is_left_alone(node: FakeNode):
    sandbox = await node.orchestrator.create(CreateRequest("base"))
    upper = node.parts.store.sandbox(sandbox.sandbox_id).vm.upper_layer
    node.parts.layers.upper(upper).index.write_bytes(b"index")
    node.parts.layers.path(upper).write_bytes(b"data")
    assert (await node.orchestrator.verify_layer(upper)).state == "written"


async def test_in_the_background_each_layer_has_its_turn(node: FakeNode, place: RealRegistry, tmp_path: Path):
    image = await pulled(node, place, tmp_path, "turn/tool")
    wanted = {*image.layer_ids, "templatedisk", "templatememory"}
    parts = node.parts
    parts.config = parts.config.model_copy(update={"storage": StorageConfig(verify_mb_per_s=1000, verify_days=10)})
    old_s = time.time() - 7200
    for layer_id in wanted:
        os.utime(parts.layers.path(layer_id), (old_s, old_s))
    young = next(iter(image.layer_ids))
    os.utime(parts.layers.path(young))
    keeper = asyncio.create_task(verify.run(parts, node.orchestrator.images))
    try:
        async with asyncio.timeout(20):
            while not all(parts.layers.digests.get(layer_id) for layer_id in wanted - {young}):  # noqa: ASYNC110 - files tell no events
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        assert parts.layers.digests.get(young) is None, "one that may be gone soon has time"
    finally:
        keeper.cancel()
    assert verify._next(parts, 10) is None, "all were looked at lately"
    noted = parts.layers.path(image.layer_ids[1]).with_suffix(".sha256")
    os.utime(noted, (old_s - 11 * 86_400,) * 2)
    assert verify._next(parts, 10) == image.layer_ids[1]


async def test_a_low_rate(node: FakeNode):
    parts = node.parts
    parts.layers.path("templatedisk").write_bytes(bytes(9 << 20))
    began_s = time.monotonic()
    await verify.verify(parts, node.orchestrator.images, "templatedisk", 16 << 20)
    assert time.monotonic() - began_s > 0.4
