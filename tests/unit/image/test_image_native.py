"""Disks that are pushed as overlaybd images and opened from the registry again, with a real registry and a real blockd."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from image_rig import (
    FolderOfLayers,
    Layout,
    check_file_system,
    converter,
    digest_of,
    folder,
    layer,
    member,
    mounted,
    quiet,
    symlink,
    tool,
    tree,
)
from registry_rig import PASSWORD, USER, RealRegistry, real_registry

from agentenv.block import supervisor
from agentenv.block.client import BlockClient
from agentenv.config.schema import ImagesConfig
from agentenv.core.errors import AgentEnvError, DataCorrupt, InvalidInput, NotFound, PermissionDenied, Unavailable
from agentenv.core.images import Platform
from agentenv.core.model import Context
from agentenv.host import native
from agentenv.image.archives import load_folder
from agentenv.image.blobs import BlobFolder
from agentenv.image.credentials import Credentials
from agentenv.image.helper_logins import HelperLogins
from agentenv.image.manifest import NATIVE_ARTIFACT
from agentenv.image.native import NativeImages, blob_of, planned
from agentenv.image.push import Disk, Publisher, Pushed
from agentenv.image.registry import Registry

NOISE = random.Random(1).randbytes
BASE = layer(folder("etc"), member("etc/hostname", "one"), member("big", NOISE(6 << 20)), symlink("link", "big"), member("gone", "x"))
MIDDLE = layer(member("etc/hostname", "two"), member(".wh.gone"), member("middle", NOISE(1 << 20)))
TOPS = {name: layer(member("top", name * 1000), member(f"of-{name}", NOISE(200_000))) for name in ("a", "b")}
CONTEXT = Context("1000", "/srv", {"B": "2", "A": "1=1"})
CREATED = "2026-01-01T00:00:00Z"


@dataclass
class Machine:
    """A node's parts that have to do with images: its own blockd, layer store and caches."""

    work: Path
    place: RealRegistry
    blocks: BlockClient
    config: ImagesConfig
    layers: FolderOfLayers
    registry: Registry
    natives: NativeImages
    publisher: Publisher

    async def made(self, name: str, layers: Sequence[bytes]) -> tuple[str, ...]:
        """Layers of archives, converted into the store."""
        layout = Layout.make(self.work / f"layout-{name}", layers)
        local = load_folder(layout.folder, name, Platform())
        converted = await converter(self.layers.folder).convert(local, quiet)
        return converted.layer_ids

    async def push(self, layers: Sequence[str], name: str, credentials: Credentials | None = None) -> Pushed:
        return await self.publisher.push(Disk(tuple(layers), CONTEXT, CREATED), f"{self.place.host}/{name}", credentials, quiet)

    async def adopt(self, name: str, credentials: Credentials | None = None) -> list[Path]:
        """Open an image without its bytes; returns its layer files."""
        found = self.registry.resolve(f"{self.place.host}/{name}", credentials)
        assert found.manifest.native
        disk = await self.natives.adopt(found.manifest.layers, found.found_at, credentials, quiet)
        return [self.layers.path(one.layer_id) for one in disk.layers]

    async def image(self, layers: Sequence[Path], target: Path) -> Path:
        """All bytes of a disk."""
        stack = await self.blocks.open(target.stem, layers, None, None, "page")
        shutil.copyfile(stack.path, target)
        await self.blocks.close_stack(target.stem, force=True)
        return target

    async def fetched_bytes(self) -> int:
        return int(sum(one["fetched_bytes"] for one in (await self.blocks.remotes())["layers"]))


@contextlib.asynccontextmanager
async def machine(work: Path, place: RealRegistry, **settings: Any) -> AsyncIterator[Machine]:
    work.mkdir()
    chosen = {
        "insecure_registries": (place.host,),
        "docker_config": str(work / "none.json"),
        "certs_dir": work / "certs",
        "download_mb_per_s": 0,
    }
    config = ImagesConfig(**(chosen | settings))
    run = work / "run"
    run.mkdir()
    blocks = await supervisor.ensure_running(
        native.program("blockd"), run, work / "blockd.log", supervisor.remote_flags(work / "cache", config, 0, work / "logins.json")
    )
    try:
        layers = FolderOfLayers(work / "layers")
        registry = Registry(work / "cache", config)
        publisher = Publisher(work / "cache", registry, layers, blocks)
        helpers = HelperLogins(work / "logins.json", Path(config.docker_config))
        yield Machine(work, place, blocks, config, layers, registry, NativeImages(layers, blocks, config, helpers), publisher)
    finally:
        await blocks.close()
        await supervisor.stop(run)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "plain") as registry:
        yield registry


@pytest.fixture
async def maker(tmp_path: Path, place: RealRegistry) -> AsyncIterator[Machine]:
    async with machine(tmp_path / "maker", place) as made:
        yield made


def stored_bytes(place: RealRegistry) -> int:
    """What all blobs in the registry take."""
    return sum(path.stat().st_size for path in place.log.parent.joinpath("data").rglob("data") if path.is_file())


async def test_a_pushed_disk_reads_the_same_from_the_registry(maker: Machine, tmp_path: Path) -> None:
    layers = await maker.made("a", (BASE, MIDDLE, TOPS["a"]))
    pushed = await maker.push(layers, "round/trip:1")
    manifest = json.loads(tool("skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{pushed.reference}"))
    prefix = "containerd.io/snapshot/overlaybd/"
    for entry in manifest["layers"]:
        assert entry["mediaType"] == "application/vnd.oci.image.layer.v1.tar"
        assert entry["annotations"][f"{prefix}blob-digest"] == entry["digest"]
        assert entry["annotations"][f"{prefix}blob-size"] == str(entry["size"])
        assert entry["annotations"][f"{prefix}version"] == "0.1.0"
    async with machine(tmp_path / "other", maker.place) as other:
        found = other.registry.resolve(pushed.reference)
        config = other.registry.configuration(found, None)
        assert (config.user, config.working_dir, config.env) == ("1000", "/srv", ("A=1=1", "B=2"))
        assert list(config.diff_ids) == [entry["digest"] for entry in manifest["layers"]]
        remote = await other.adopt("round/trip:1")
        assert planned(found.manifest.layers) == [path.stem for path in remote]
        total = sum(blob.size_bytes for blob in pushed.layers)
        cached = (await other.blocks.remotes())["cache"]["used_bytes"]
        assert cached < total / 3, "only the indexes were read"
        mine = await maker.image([maker.layers.path(one) for one in layers], tmp_path / "mine.raw")
        theirs = await other.image(remote, tmp_path / "theirs.raw")
        assert all(blob_of(path) is not None for path in remote)
        with mine.open("rb") as one, theirs.open("rb") as two:
            assert hashlib.file_digest(one, "sha256").digest() == hashlib.file_digest(two, "sha256").digest()
        check_file_system(theirs)
        with mounted(theirs, tmp_path / "mounted") as root:
            facts = tree(root)
        assert facts["etc/hostname"]["sha256"] == hashlib.sha256(b"two").hexdigest()
        assert "gone" not in facts
        assert facts["link"]["target"] == b"big"


async def test_only_new_layers_travel(maker: Machine, tmp_path: Path) -> None:
    first = await maker.push(await maker.made("a", (BASE, MIDDLE, TOPS["a"])), "shared/tool:a")
    before = stored_bytes(maker.place)
    again = await maker.push(await maker.made("a", (BASE, MIDDLE, TOPS["a"])), "shared/tool:a")
    assert (again.digest, stored_bytes(maker.place)) == (first.digest, before)
    second = await maker.push(await maker.made("b", (BASE, MIDDLE, TOPS["b"])), "shared/tool:b")
    new = second.layers[-1].size_bytes
    assert first.layers[:-1] == second.layers[:-1]
    documents = 10_000
    assert new <= stored_bytes(maker.place) - before <= new + documents
    # Another node makes the same blobs of the same images; none is sent.
    async with machine(tmp_path / "other", maker.place) as other:
        before = stored_bytes(maker.place)
        same = await other.push(await other.made("a", (BASE, MIDDLE, TOPS["a"])), "shared/tool:c")
        assert (same.digest, stored_bytes(maker.place)) == (first.digest, before)


async def test_a_disk_on_remote_layers_is_pushed_without_them(maker: Machine, tmp_path: Path) -> None:
    first = await maker.push(await maker.made("a", (BASE, MIDDLE)), "chain/tool:1")
    top = (await maker.made("b", (BASE, MIDDLE, TOPS["a"])))[-1]
    async with machine(tmp_path / "other", maker.place) as other:
        lowers = [path.stem for path in await other.adopt("chain/tool:1")]
        shutil.copy(maker.layers.path(top), other.layers.path(top))
        fetched = await other.fetched_bytes()
        second = await other.push((*lowers, top), "chain/tool:2")
        assert [blob.digest for blob in second.layers[:-1]] == [blob.digest for blob in first.layers]
        assert await other.fetched_bytes() <= fetched
        with real_registry(tmp_path / "elsewhere") as foreign:
            settings = other.config.model_copy(update={"insecure_registries": (foreign.host,)})
            publisher = Publisher(tmp_path / "cache", Registry(tmp_path / "cache", settings), other.layers, other.blocks)
            with pytest.raises(AgentEnvError) as caught:
                await publisher.push(Disk((*lowers, top), CONTEXT, CREATED), f"{foreign.host}/chain/tool:2", None, quiet)
        assert f"{len(lowers)} of the layers are still in another registry" in caught.value.hint


async def test_a_layer_in_use_is_downloaded_whole(maker: Machine, tmp_path: Path) -> None:
    pushed = await maker.push(await maker.made("a", (BASE,)), "whole/tool:1")
    async with machine(tmp_path / "other", maker.place, download_mb_per_s=1000, download_delay_s=0) as other:
        paths = await other.adopt("whole/tool:1")
        stack = await other.blocks.open("used", paths, None, None, "page")
        async with asyncio.timeout(30):
            while any(blob_of(path) for path in paths):  # noqa: ASYNC110 - another process changes them
                await asyncio.sleep(0.02)
        assert [digest_of(path.read_bytes()) for path in paths] == [blob.digest for blob in pushed.layers]
        assert stack.path.stat().st_size == stack.virtual_size_bytes
        assert (await other.blocks.remotes())["cache"]["used_bytes"] == 0
        # It can be published elsewhere now, as the very same blobs.
        with real_registry(tmp_path / "elsewhere") as foreign:
            settings = other.config.model_copy(update={"insecure_registries": (foreign.host,)})
            registry = Registry(tmp_path / "cache", settings)
            publisher = Publisher(tmp_path / "cache", registry, other.layers, other.blocks)
            again = await publisher.push(Disk(tuple(path.stem for path in paths), CONTEXT, CREATED), f"{foreign.host}/x", None, quiet)
        assert again.digest == pushed.digest


async def test_an_imported_layout_is_taken_as_it_is(maker: Machine, tmp_path: Path) -> None:
    pushed = await maker.push(await maker.made("a", (BASE, MIDDLE)), "layout/tool:1")
    target = tmp_path / "layout"
    options = ("--src-tls-verify=false", "--dest-oci-accept-uncompressed-layers")
    tool("skopeo", "--insecure-policy", "copy", "-q", *options, f"docker://{pushed.reference}", f"oci:{target}:image")
    async with machine(tmp_path / "other", maker.place) as other:
        pulled = other.registry.pull(other.registry.resolve(pushed.reference), None, quiet)
        local = load_folder(target, "x", Platform())
        assert (local.manifest, local.config) == (pulled.manifest, pulled.config)
        disk = await other.natives.take(local.manifest.layers, local.blobs)
        assert [digest_of(other.layers.path(one.layer_id).read_bytes()) for one in disk.layers] == [blob.digest for blob in pushed.layers]
        blob = BlobFolder(target / "blobs").path(pushed.layers[0].digest)
        blob.write_bytes(b"x" + blob.read_bytes()[1:])
        other.layers.path(disk.layers[0].layer_id).unlink()
        with pytest.raises(DataCorrupt, match="damaged"):
            await other.natives.take(local.manifest.layers, local.blobs)
        assert not other.layers.path(disk.layers[0].layer_id).exists()


async def test_a_password_is_needed_and_given_credentials_are_used(tmp_path: Path) -> None:
    with real_registry(tmp_path / "registry", password=True) as place:
        known = Credentials(USER, PASSWORD)
        async with machine(tmp_path / "maker", place) as maker:
            layers = await maker.made("a", (TOPS["a"],))
            with pytest.raises(PermissionDenied):
                await maker.push(layers, "secret/tool")
            await maker.push(layers, "secret/tool", known)
        async with machine(tmp_path / "other", place) as other:
            found = other.registry.resolve(f"{place.host}/secret/tool", known)
            for wrong in (None, Credentials(USER, "guess")):
                with pytest.raises(PermissionDenied):
                    await other.natives.adopt(found.manifest.layers, found.found_at, wrong, quiet)
            await other.adopt("secret/tool", known)
            kept = [path for path in (tmp_path / "other").rglob("*") if path.is_file()]
            assert not [path for path in kept if PASSWORD.encode() in path.read_bytes()]


async def test_a_credential_helper_gives_the_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """blockd asks no helpers: it reads what they gave from a file, and what they give later."""
    helper, answers = tmp_path / "bin" / "docker-credential-vault", tmp_path / "password"
    helper.parent.mkdir()
    helper.write_text(f'#!/bin/sh\nread server\nprintf \'{{"Username": "{USER}", "Secret": "%s"}}\' "$(cat {answers})"\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    config = tmp_path / "config.json"
    with real_registry(tmp_path / "private", password=True) as private:
        config.write_text(json.dumps({"credHelpers": {private.host: "vault"}}))
        async with machine(tmp_path / "one", private) as one:
            layers = await one.made("i", (TOPS["a"],))
            await one.push(layers, "team/helped", Credentials(USER, PASSWORD))
        answers.write_text("wrong")
        async with machine(tmp_path / "two", private, docker_config=str(config), cache_mb=0) as two:
            with pytest.raises(PermissionDenied):
                await two.adopt("team/helped")
            answers.write_text(PASSWORD)
            taken = await two.adopt("team/helped")
            image = await two.image(taken, tmp_path / "helped.img")
            assert image.stat().st_size > 0
            kept = two.work / "logins.json"
            assert f"{kept.stat().st_mode & 0o777:o}" == "600"
            assert list(json.loads(kept.read_text())["auths"]) == [private.host]
            for process in (path for path in Path("/proc").glob("[0-9]*") if path.exists()):
                with contextlib.suppress(OSError):
                    assert PASSWORD.encode() not in (process / "cmdline").read_bytes()
            assert PASSWORD not in (two.work / "blockd.log").read_text()
            helper.unlink()
            two.natives.helpers.refresh((private.host,))
            assert json.loads(kept.read_text())["auths"], "a helper that is away for a while takes nothing away"
            config.write_text("{}")
            two.natives.helpers.refresh((private.host,))
            assert not json.loads(kept.read_text())["auths"], "one that is no longer named does"


async def test_a_registry_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    with real_registry(tmp_path / "registry", tls=True) as place:
        assert place.ca is not None
        certificates = tmp_path / "certs"
        (certificates / place.host).mkdir(parents=True)
        shutil.copy(place.ca, certificates / place.host / "ca.crt")
        async with machine(tmp_path / "maker", place, insecure_registries=(), certs_dir=certificates) as maker:
            await maker.push(await maker.made("a", (TOPS["a"],)), "tls/tool")
            assert await maker.adopt("tls/tool")
        async with machine(tmp_path / "other", place, insecure_registries=(), certs_dir=tmp_path / "none") as other:
            found = maker.registry.resolve(f"{place.host}/tls/tool")
            with pytest.raises(Unavailable, match="certificate"):
                await other.natives.adopt(found.manifest.layers, found.found_at, None, quiet)
        async with machine(tmp_path / "third", place) as unchecked:
            assert await unchecked.adopt("tls/tool")


async def test_a_twin_is_used_in_place_of_an_ordinary_image(maker: Machine, tmp_path: Path) -> None:
    layout = Layout.make(tmp_path / "plain", (BASE,))
    name = maker.place.push(layout.folder, "twin/tool:1")
    ordinary = maker.registry.resolve(name)
    assert not ordinary.manifest.native
    twin = await maker.push(await maker.made("a", (BASE,)), "twin/tool:converted")
    kind = "application/vnd.oci.image.index.v1+json"
    size = len(tool("skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{twin.reference}"))
    of_manifest = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "size": size}
    other = of_manifest | {"digest": ordinary.digest, "artifactType": "application/example"}
    entry = of_manifest | {"digest": twin.digest, "artifactType": NATIVE_ARTIFACT}
    put_manifest(maker.place, f"twin/tool/manifests/{ordinary.digest.replace(':', '-')}", kind, [entry])
    asked = Registry(tmp_path / "cache", maker.config.model_copy(update={"twins": (maker.place.host,)}))
    found = asked.resolve(name)
    assert (found.digest, found.manifest.native) == (twin.digest, True)
    assert maker.registry.resolve(name).digest == ordinary.digest, "nobody said that this registry has twins"
    put_manifest(maker.place, f"twin/tool/manifests/{ordinary.digest.replace(':', '-')}", kind, [other])
    assert asked.resolve(name).digest == ordinary.digest
    plain = maker.place.push(Layout.make(tmp_path / "lone", (MIDDLE,)).folder, "twin/lone:1")
    assert not asked.resolve(plain).manifest.native


def put_manifest(place: RealRegistry, path: str, kind: str, entries: list[dict[str, Any]]) -> None:
    body = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": entries})
    reply = httpx.put(f"http://{place.host}/v2/{path}", content=body, headers={"content-type": kind})
    assert reply.status_code == 201, reply.text


async def test_what_is_gone_from_the_registry_is_said_to_be(maker: Machine, tmp_path: Path) -> None:
    await maker.push(await maker.made("a", (TOPS["a"],)), "gone/tool")
    found = maker.registry.resolve(f"{maker.place.host}/gone/tool")
    blobs = maker.place.log.parent / "data" / "docker/registry/v2/repositories/gone/tool/_layers"
    shutil.rmtree(blobs)
    async with machine(tmp_path / "other", maker.place) as other:
        with pytest.raises(NotFound, match="no longer has it"):
            await other.natives.adopt(found.manifest.layers, found.found_at, None, quiet)
    with pytest.raises(InvalidInput, match="names a tag"):
        await maker.push((), f"gone/tool@{found.digest}")
