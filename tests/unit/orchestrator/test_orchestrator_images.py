"""Images on a whole node: one pull for all who ask, what is recorded and kept, what goes, and what builds start from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ecr_stub
import pytest
from image_rig import Layout, folder, layer, member, tool
from registry_rig import PASSWORD, USER, RealRegistry, real_registry

from agentenv.config.schema import Config, GuestConfig, ImagesConfig, LimitsConfig
from agentenv.core.builds import BuildPlan, Registry, Step
from agentenv.core.errors import Conflict, DataCorrupt, InvalidInput, NotFound, PermissionDenied, StorageFull, Unavailable, Unsupported
from agentenv.core.images import Image, ImageConfig, ImageLayer, Platform
from agentenv.core.model import Machine, Snapshot
from agentenv.image.manifest import OVERLAYBD
from agentenv.testing.fake_node import FakeNode

BOTTOM = layer(folder("etc"), member("etc/base", b"b" * 300_000))
TOP = {name: layer(member(name, name * 1000)) for name in ("one", "two")}
REF = "org.opencontainers.image.ref.name"
RUN = {"Env": ["A=1", "broken", "B=x=y"], "User": "12:34", "WorkingDir": "/srv/$app"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "plain") as registry:
        yield registry


@pytest.fixture
async def node(tmp_path: Path, place: RealRegistry) -> AsyncIterator[FakeNode]:
    node = FakeNode(tmp_path / "node")
    images = ImagesConfig(
        insecure_registries=(place.host, "127.0.0.1:1"), docker_config=str(tmp_path / "none.json"), certs_dir=tmp_path / "certs"
    )
    limits = LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=0)
    node.config = Config(images=images, guest=GuestConfig(disk_mb=1024), limits=limits)
    await node.start_server()
    with_threads()
    yield node
    await node.close()


def with_threads() -> None:
    """Pulls take their time; other work must go on meanwhile."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))


def push(place: RealRegistry, work: Path, name: str, *layers: bytes, run: dict[str, object] | None = None) -> str:
    layout = Layout.make(work / name.replace("/", "-").replace(":", "-"), layers, run=run or RUN)
    return place.push(layout.folder, name)


def layer_files(node: FakeNode) -> set[str]:
    return {path.name.split(".")[0] for path in node.parts.layers.files()} - {"templatememory", "templatedisk"}


async def test_two_hundred_that_ask_at_once_pull_once(node: FakeNode, place: RealRegistry, tmp_path: Path):
    name = push(place, tmp_path, "many/tool:1", BOTTOM, TOP["one"])
    before = place.blobs_served()
    heard: list[list[str]] = [[] for _ in range(200)]
    bases = await asyncio.gather(*(node.orchestrator.images.base(name, None, said.append) for said in heard))
    assert place.blobs_served() - before == 3, "two layers and a configuration"
    assert len({base.snapshot_id for base in bases}) == 1
    assert all(f"pull {name}" in said for said in heard), "everybody sees how far it is"
    await node.quiesce()
    assert node.problems() == []


async def test_a_base_is_what_the_image_says(node: FakeNode, place: RealRegistry, tmp_path: Path):
    name = push(place, tmp_path, "said/tool:1", BOTTOM)
    base = await node.orchestrator.images.base(name, None, lambda _: None)
    image = node.orchestrator.images.find(name)
    assert base.label == f"{name}@{image.digest}"
    assert image.digest in base.origin
    assert base.context.env_vars == {"A": "1", "B": "x=y"}
    assert [str(step) for step in base.preparation] == ["USER 12:34", r"WORKDIR /srv/\$app"]
    plain = push(place, tmp_path, "silent/tool:1", BOTTOM, run={"Cmd": ["/x"]})
    base = await node.orchestrator.images.base(plain, None, lambda _: None)
    assert [str(step) for step in base.preparation] == ["USER user", "WORKDIR /home/user"]


async def test_what_images_share_is_stored_once_and_goes_with_the_last(node: FakeNode, place: RealRegistry, tmp_path: Path):
    images = node.orchestrator.images
    one = await images.pull(push(place, tmp_path, "share/one:1", BOTTOM, TOP["one"]))
    alone = sum(use.size_bytes for use in await node.orchestrator.layers())
    two = await images.pull(push(place, tmp_path, "share/two:1", BOTTOM, TOP["two"]))
    assert one.layers[:2] == two.layers[:2]
    assert layer_files(node) == {*one.layer_ids, *two.layer_ids}
    uses = {use.layer_id: use for use in await node.orchestrator.layers()}
    both = (f"image {two.names[0]}", f"image {one.names[0]}")
    assert set(uses[one.layers[1].layer_id].users) == set(both)
    assert uses[two.layers[2].layer_id].users == (both[0],)
    grown = sum(use.size_bytes for use in uses.values()) - alone
    assert grown == uses[two.layers[2].layer_id].size_bytes, "the second image costs its own layer"
    await images.remove(one.names[0])
    await node.quiesce()
    assert (layer_files(node), node.problems()) == (set(two.layer_ids), [])
    await images.remove(two.digest)
    await node.quiesce()
    assert (layer_files(node), images.all(), node.problems()) == (set(), [], [])


async def test_a_tag_that_moves_leaves_the_former_image_only_to_those_who_use_it(node: FakeNode, place: RealRegistry, tmp_path: Path):
    images = node.orchestrator.images
    name = push(place, tmp_path, "moving/tool:1", BOTTOM, TOP["one"])
    first = await images.pull(name)
    by_digest = await images.pull(f"{place.host}/moving/tool@{first.digest}")
    assert by_digest.digest == first.digest
    assert len(by_digest.names) == 2
    push(place, tmp_path / "again", "moving/tool:1", BOTTOM, TOP["two"])
    second = await images.pull(name)
    assert second.digest != first.digest
    assert images.find(name).digest == second.digest
    assert images.find(first.digest).names == (f"{place.host}/moving/tool@{first.digest}",)
    await images.remove(f"{place.host}/moving/tool@{first.digest}")
    await node.quiesce()
    assert layer_files(node) == set(second.layer_ids)


async def test_a_recorded_image_survives_the_server_and_a_registry_that_is_down(node: FakeNode, tmp_path: Path):
    with real_registry(tmp_path / "registry") as place:
        registries = (*node.config.images.insecure_registries, place.host)
        node.config = node.config.model_copy(update={"images": node.config.images.model_copy(update={"insecure_registries": registries})})
        await node.start_server()
        with_threads()
        image = await node.orchestrator.images.pull(push(place, tmp_path, "kept/tool:1", BOTTOM))
    node.kill_server()
    await node.start_server()
    with_threads()
    said: list[str] = []
    base = await node.orchestrator.images.base(image.names[0], None, said.append)
    assert base.snapshot_id == image.snapshot_id
    assert any("connection refused" in line for line in said)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1/other"):
        await node.orchestrator.images.base("127.0.0.1:1/other", None, said.append)


async def test_credentials_go_to_the_registry_that_asks_for_them(node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with real_registry(tmp_path / "registry", password=True) as place, ecr_stub.serving(monkeypatch) as amazon:
        registries = (place.host,)
        node.config = node.config.model_copy(update={"images": node.config.images.model_copy(update={"insecure_registries": registries})})
        await node.start_server()
        with_threads()
        layout = Layout.make(tmp_path / "private", (BOTTOM,))
        name = place.push(layout.folder, "private/tool:1", with_password=True)
        for account in (None, Registry("registry", {"username": USER, "password": "wrong"})):
            with pytest.raises(PermissionDenied):
                await node.orchestrator.images.base(name, account, lambda _: None)
        account = Registry("registry", {"username": USER, "password": PASSWORD})
        assert await node.orchestrator.images.base(name, account, lambda _: None)
        amazon.give(f"{USER}:{PASSWORD}")
        keys = Registry("aws", {"awsAccessKeyId": "A", "awsSecretAccessKey": "s", "awsRegion": "eu-central-1"})
        assert await node.orchestrator.images.base(name, keys, lambda _: None)
        assert len(amazon.asked) == 1
        with pytest.raises(PermissionDenied):  # what one caller may see is not shown to the next
            await node.orchestrator.images.pull(name, Registry("registry", {"username": USER, "password": "wrong"}))


@pytest.mark.parametrize("kind", ["folder", "oci", "docker", "root"])
async def test_images_that_come_as_files(kind: str, node: FakeNode, tmp_path: Path):
    layout = Layout.make(tmp_path / "layout", (BOTTOM, TOP["one"]), run=RUN)
    source = tmp_path / "image.tar"
    if kind == "folder":
        source = layout.folder
    elif kind == "oci":
        tool("tar", "-C", layout.folder, "-cf", source, ".")
    elif kind == "docker":
        tool("skopeo", "--insecure-policy", "copy", "-q", f"oci:{layout.folder}:image", f"docker-archive:{source}:tool:1")
    else:
        source.write_bytes(BOTTOM)
    images = node.orchestrator.images
    image = await images.bring(source, "team/tool:2")
    assert image.names == ("docker.io/team/tool:2",)
    assert len(image.layers) == (2 if kind == "root" else 3)
    base = await images.base("team/tool:2", None, lambda _: None)  # no registry is asked
    assert base.snapshot_id == image.snapshot_id
    again = await images.bring(source, "team/other")
    assert again.digest == image.digest
    await node.quiesce()
    assert (node.problems(), layer_files(node)) == ([], set(image.layer_ids))
    assert not list((node.paths.cache / "images").glob(".import-*"))
    assert (await images.remove(image.digest[:14])).names == ()


async def test_what_cannot_be_found_or_brought(node: FakeNode, tmp_path: Path):
    images = node.orchestrator.images
    for text in ("none", "sha256:" + "0" * 64, "0123456789"):
        with pytest.raises(NotFound):
            images.find(text)
        with pytest.raises(NotFound):
            await images.remove(text)
    for text in ("UPPER", "x:", "x@sha256:1"):
        with pytest.raises(InvalidInput):
            await images.pull(text)
    with pytest.raises(InvalidInput, match="without a digest"):
        await images.bring(tmp_path, f"x@sha256:{'0' * 64}")
    (tmp_path / "bad").write_bytes(b"no archive" * 1000)
    with pytest.raises(InvalidInput):
        await images.bring(tmp_path / "bad", "x")
    await node.quiesce()
    assert (node.problems(), images.all(), layer_files(node)) == ([], [], set())


async def test_a_full_disk_or_a_bad_layer_leaves_what_was_there(node: FakeNode, place: RealRegistry, tmp_path: Path):
    images = node.orchestrator.images
    name = push(place, tmp_path, "bad/tool:1", BOTTOM, b"no archive " * 500)
    good = await images.pull(push(place, tmp_path, "good/tool:1", BOTTOM))
    limits = node.parts.config.limits
    node.parts.config = node.parts.config.model_copy(update={"limits": limits.model_copy(update={"disk_reserve_mb": 1 << 40})})
    with pytest.raises(StorageFull):
        await images.pull(name)
    node.parts.config = node.config
    with pytest.raises(InvalidInput):
        await images.pull(name)
    await node.quiesce()
    assert (node.problems(), layer_files(node)) == ([], set(good.layer_ids))


async def test_an_image_that_goes_while_a_build_begins_ends_the_build(node: FakeNode, tmp_path: Path):
    layout = Layout.make(tmp_path / "layout", (BOTTOM,))
    images = node.orchestrator.images
    image = await images.bring(layout.folder, "tool")

    async def removed(text: str, *_: object) -> object:
        await images.remove(image.digest)
        return image

    images.pull = removed  # type: ignore[method-assign]
    await node.parts.store.images.put(replace(image, imported=False))
    with pytest.raises(Conflict, match="removed while"):
        await images.base("tool", None, lambda _: None)


def push_native(place: RealRegistry, work: Path, name: str, *blobs: bytes, **annotations: str) -> str:
    """An image with overlaybd's annotations; the layers of the fake blockd are JSON."""
    layout = Layout.make(work / name.replace("/", "-").replace(":", "-"), blobs, packing="none", run=RUN)
    for entry in layout.manifest["layers"]:
        entry["annotations"] = {f"{OVERLAYBD}blob-digest": entry["digest"]} | {
            f"{OVERLAYBD}{key}": value for key, value in annotations.items()
        }
    kind = layout.manifest["mediaType"]
    entry = layout.blob(json.dumps(layout.manifest).encode(), kind)
    layout.write_index([entry | {"annotations": {"org.opencontainers.image.ref.name": "image"}}])
    tool("skopeo", "--insecure-policy", "copy", "-q", "--preserve-digests", "--dest-tls-verify=false", f"oci:{layout.folder}:image",
         f"docker://{place.host}/{name}")  # fmt: skip
    return f"{place.host}/{name}"


NATIVE = (b'{"0": "bottom"}', b'{"1": "top"}')


async def test_a_native_image_stays_in_the_registry(node: FakeNode, place: RealRegistry, tmp_path: Path):
    name = push_native(place, tmp_path, "native/tool:1", *NATIVE)
    before = place.blobs_served()
    image = await node.orchestrator.images.pull(name)
    assert place.blobs_served() - before == 1, "the configuration"
    assert [layer_id.partition("-")[0] for layer_id in image.layer_ids] == ["native", "native"]
    assert layer_files(node) == set(image.layer_ids)
    assert json.loads(node.parts.layers.path(image.layer_ids[0]).read_text())["remote"].startswith(
        f"http://{place.host}/v2/native/tool/blobs/"
    )
    again = await node.orchestrator.images.pull(name)
    assert (again.snapshot_id, again.digest) == (image.snapshot_id, image.digest)
    asked = node.points.passed.count("blocks.add_remote")
    await node.orchestrator.images.pull(name, Registry("registry", {"username": "u", "password": "p"}))
    assert node.points.passed.count("blocks.add_remote") - asked == 2, "blockd may have forgotten the login"
    base = await node.orchestrator.images.base(name, None, lambda _: None)
    assert base.context.env_vars == {"A": "1", "B": "x=y"}
    assert base.machine.disk_mb == 1, "the disk of the fake blockd, not the node's"
    await node.orchestrator.images.remove(name)
    await node.quiesce()
    assert (layer_files(node), node.problems()) == (set(), [])


async def test_what_cannot_be_read_as_needed_is_downloaded_whole(node: FakeNode, place: RealRegistry, tmp_path: Path):
    name = push_native(place, tmp_path, "whole/tool:1", *NATIVE)
    said: list[str] = []
    node.points.fail("blocks.add_remote", error=Unavailable("invalid peer certificate"))
    image = await node.orchestrator.images.pull(name, None, lambda step, *_: said.append(step))
    assert any("invalid peer certificate" in step for step in said)
    assert [node.parts.layers.path(layer_id).read_bytes() for layer_id in image.layer_ids] == list(NATIVE)
    await node.quiesce()
    assert node.problems() == []


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"blob-fs-type": "erofs"}, "erofs"),
        ({"turbo-oci/target-digest": "x"}, "TurboOCI"),
        ({"blob-digest": "sha256:" + "0" * 64}, "TurboOCI"),
    ],
)
async def test_other_kinds_of_overlaybd_images_are_refused(
    annotations: dict[str, str], words: str, node: FakeNode, place: RealRegistry, tmp_path: Path
):
    name = push_native(place, tmp_path, "other/tool:1", *NATIVE, **annotations)
    with pytest.raises(Unsupported, match=words):
        await node.orchestrator.images.pull(name)


async def test_a_template_is_pushed_as_an_image_of_its_disk(node: FakeNode, place: RealRegistry):
    pushed = await node.orchestrator.push("base", f"{place.host}/pushed/base:1")
    assert len(pushed.layers) == 1
    image = await node.orchestrator.images.pull(pushed.reference)
    assert image.digest == pushed.digest
    with pytest.raises(NotFound):
        await node.orchestrator.push("nothing", f"{place.host}/pushed/base:1")


def _damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        for place in range(len(content)) if how == "zero" else [len(content) // 2]:
            content[place] = 0 if how == "zero" else content[place] ^ 0xFF
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["delete", "truncate", "empty", "zero", "flip"])
async def test_a_damaged_copy_of_any_blob_is_fetched_again(how: str, node: FakeNode, place: RealRegistry, tmp_path: Path):
    """E05: the cache is no truth. What of the image's layers is there is used, and a damaged blob makes nobody wait for an operator."""
    images, blobs = node.orchestrator.images, node.parts.image_registry.blobs
    name = push(place, tmp_path, f"damaged/{how}:1", BOTTOM, TOP["one"])
    image = await images.pull(name)
    wanted = {layer_id: node.parts.layers.path(layer_id).read_bytes() for layer_id in image.layer_ids}
    for path in sorted(path for path in blobs.folder.rglob("*") if path.is_file()):
        await images.remove(name)
        await node.quiesce()
        _damage(path, how)
        again = await images.pull(name)
        assert (again.digest, again.layer_ids, again.config) == (image.digest, image.layer_ids, image.config)
        assert {layer_id: node.parts.layers.path(layer_id).read_bytes() for layer_id in again.layer_ids} == wanted
    assert node.problems() == []


async def test_a_layer_that_is_not_what_its_image_states_is_asked_for_once(node: FakeNode, place: RealRegistry, tmp_path: Path):
    layout = Layout.make(tmp_path / "lying", (BOTTOM,), "none")
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [f"sha256:{'0' * 64}"]}}
    manifest = layout.manifest | {"config": layout.blob(json.dumps(config).encode(), layout.manifest["config"]["mediaType"])}
    layout.write_index([layout.blob(json.dumps(manifest).encode(), manifest["mediaType"]) | {"annotations": {REF: "image"}}])
    name = place.push(layout.folder, "lying/tool:1")
    before = place.blobs_served()
    with pytest.raises(DataCorrupt, match="the image states another"):
        await node.orchestrator.images.pull(name)
    assert place.blobs_served() - before == 2
    await node.quiesce()
    assert node.problems() == []


async def fake_image(node: FakeNode, name: str, count: int) -> Image:
    """An image of `count` layers as the node's own disks are made of here: one block each."""
    diff_ids = tuple(f"sha256:{number:064x}" for number in range(count))
    layers = tuple(ImageLayer(layer_id, "", 1) for layer_id in node.parts.image_converter.planned(diff_ids))
    for number, one in enumerate(layers):
        node.parts.layers.path(one.layer_id).write_text(json.dumps({f"image {number}": "yes"}))
    image = Image(f"sha256:{count:064x}", (name,), Platform(), layers, ImageConfig(diff_ids=diff_ids), f"s{count:020}", 1, 1, imported=True)
    machine = Machine(1, 16, 64)
    await node.parts.store.add_snapshot(Snapshot(image.snapshot_id, machine, node.parts.identity, (), image.layer_ids, 1))
    node.paths.snapshot(image.snapshot_id).mkdir(parents=True)
    await node.parts.store.images.put(image)
    return image


@pytest.mark.parametrize("count", [1, 40, 199])
async def test_what_is_built_from_an_image_shares_all_its_layers_however_many(count: int, ram_path: Path):
    node = FakeNode(ram_path / "node")
    await node.start_server()
    image = await fake_image(node, "docker.io/library/tool:1", count)
    steps = tuple(Step("RUN", (f"step {number}",)) for number in range(40))
    job = await node.orchestrator.builds.request("mine", ())
    await node.orchestrator.builds.start(job.template_id, job.build_id, BuildPlan(from_image="tool:1", steps=steps))
    settled = asyncio.ensure_future(node.orchestrator.builds.settle())
    while not settled.done():
        await asyncio.sleep(0)
        node.clock.advance_ms(50)
    await node.quiesce()
    assert node.orchestrator.builds.job("mine", job.build_id).status == "ready", node.orchestrator.builds.job("mine", job.build_id)
    template = next(t for t in node.parts.store.templates() if t.name == "mine")
    built = node.parts.store.snapshot(template.builds[0].snapshot_id)
    assert built.disk_layers[: count + 1] == image.layer_ids
    assert len(built.disk_layers) < count + 1 + 32
    assert all(s.disk_layers[: count + 1] == image.layer_ids for s in node.parts.store.snapshots() if s.snapshot_id == image.snapshot_id)
    await node.orchestrator.images.remove("tool:1")
    await node.quiesce()
    assert node.problems() == []
    content = node.snapshot_content(built.snapshot_id)
    assert {f"image {number}" for number in range(count + 1)} | {f"step {number}" for number in range(40)} <= set(content)
    assert await node.create(template="mine")
    await node.close()
