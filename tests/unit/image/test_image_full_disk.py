"""A full disk, and a kill, at any point of a pull or a conversion: a clear error, nothing half-made is taken for whole, a repeat works."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_rig import Layout, converter, layer, member, quiet, tool
from registry_rig import real_registry

from agentenv.config.schema import ImagesConfig
from agentenv.core.errors import Internal, StorageFull
from agentenv.core.images import Platform
from agentenv.host.asset_cache import sha256_file
from agentenv.image import registry as registry_module
from agentenv.image.archives import load_archive, load_folder
from agentenv.image.convert import ConvertedImage
from agentenv.image.registry import Registry

MIB = 1 << 20
Disks = Callable[[str], Any]


def noise(seed: int, size_mib: int) -> bytes:
    return random.Random(seed).randbytes(size_mib * MIB)


LAYERS = (layer(member("a", noise(1, 2))), layer(member("b", noise(2, 3)), member("c", "small")))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.make(tmp_path / "layout", LAYERS, "none")


async def convert(layout: Layout, layers: Path, **settings: object) -> ConvertedImage:
    return await converter(layers, **settings).convert(load_folder(layout.folder, "test", Platform()), quiet)


def digests(converted: ConvertedImage, layers: Path) -> list[str]:
    return [sha256_file(layers / f"{layer_id}.lsmt") for layer_id in converted.layer_ids]


def taken_for_whole(layers: Path) -> set[str]:
    """The layers whose figures are there, each of which must be complete; nothing unfinished may lie beside them."""
    names = {path.name for path in layers.iterdir()}
    whole = {name.removesuffix(".json") for name in names if name.endswith(".json")}
    assert {f"{name}.lsmt" for name in whole} <= names
    return whole


async def test_conversion_on_a_disk_that_fills_at_any_point(layout: Layout, tmp_path: Path, small_disk: Disks) -> None:
    wanted = digests(await convert(layout, tmp_path / "layers"), tmp_path / "layers")
    outcomes = []
    for size_kib in (64, 300, 700, 1500, 2500, 4000, 5500, 7000, 9000, 12_000, 60_000):
        disk = small_disk(f"{size_kib}k")
        try:
            await convert(layout, disk.path)
        except StorageFull:
            outcomes.append(len(taken_for_whole(disk.path)))
            left = {path.name.removesuffix(".json").removesuffix(".lsmt") for path in disk.path.iterdir()}
            assert left == taken_for_whole(disk.path), "something half-made stayed"
            disk.resize("60m")
            converted = await convert(layout, disk.path)
            assert digests(converted, disk.path) == wanted
        else:
            outcomes.append(3)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 1, 2, 3}, "the sizes above do not meet every stage"


async def test_no_conversion_begins_when_it_could_not_leave_the_reserve(layout: Layout, small_disk: Disks) -> None:
    disk = small_disk("60m")
    subject = converter(disk.path)
    subject._reserve_bytes = 100 * MIB
    with pytest.raises(StorageFull, match="a layer of an image: 100 MiB needed"):
        await subject.convert(load_folder(layout.folder, "test", Platform()), quiet)
    assert list(disk.path.iterdir()) == []


def children(program: str) -> list[int]:
    """Processes of that name, anybody's children: the tests of other files run none that read these layers."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == program:
                found.append(int(entry.name))
    return found


def working_on(folder: Path) -> list[int]:
    """The conversions that write to a folder."""
    found = []
    for pid in children("imagefs"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("delay_ms", [0, 3, 10, 30, 100])
async def test_a_killed_converter_is_an_error_and_the_next_one_makes_the_same(delay_ms: int, tmp_path: Path) -> None:
    layout = Layout.make(tmp_path / "layout", (layer(member("x", noise(3, 30))),), "gzip")
    work = tmp_path / "layers"
    await convert(layout, tmp_path / "reference")
    await convert(Layout.make(tmp_path / "empty", (layer(),)), work)
    task = asyncio.ensure_future(convert(layout, work))
    while not (pids := working_on(work)):
        assert not task.done()
        await asyncio.sleep(0.001)
    await asyncio.sleep(delay_ms / 1000)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[0], signal.SIGKILL)
    try:
        await task
    except Internal as error:
        assert "imagefs failed with status -9" in error.message  # noqa: PT017 - it may also be done
    else:
        assert delay_ms >= 30, "a kill in the middle went unnoticed"  # a quick machine is done by then
        return
    before = taken_for_whole(work)
    converted = await convert(layout, work)
    assert converted.layer_ids[-1] not in before
    assert digests(converted, work) == digests(converted, tmp_path / "reference")
    assert not list(work.glob("*.tmp"))


SERVER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {rig!r})
from image_rig import converter, quiet
from agentenv.core.images import Platform
from agentenv.image.archives import load_folder
asyncio.run(converter(Path({layers!r})).convert(load_folder(Path({layout!r}), "test", Platform()), quiet))
"""


async def test_a_killed_server_takes_its_converter_along(tmp_path: Path) -> None:
    layout = Layout.make(tmp_path / "layout", (layer(member("x", noise(4, 30))),), "gzip")
    work = tmp_path / "layers"
    work.mkdir()
    script = textwrap.dedent(SERVER).format(rig=str(Path(__file__).parent), layers=str(work), layout=str(layout.folder))
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    try:
        end = time.monotonic() + 60
        while not any(b"--diff-id" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in working_on(work)):
            assert time.monotonic() < end
            assert server.returncode is None
            await asyncio.sleep(0.001)
    finally:
        server.kill()
        await server.wait()
    end = time.monotonic() + 5
    while working_on(work):
        assert time.monotonic() < end, "it goes on without anybody who would record what it makes"
        await asyncio.sleep(0.01)
    before = taken_for_whole(work)
    converted = await convert(layout, work)
    assert len(before) == 1
    assert digests(converted, work) == digests(await convert(layout, tmp_path / "reference"), tmp_path / "reference")


@pytest.mark.parametrize("is_foreseen", [True, False])
@pytest.mark.parametrize("size_kib", [900, 2500, 4500])
def test_a_pull_onto_a_disk_that_fills(
    size_kib: int, is_foreseen: bool, layout: Layout, tmp_path: Path, small_disk: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Foreseen by the sizes that the manifest names, or met by the copy since somebody else fills the disk meanwhile."""
    if not is_foreseen:
        monkeypatch.setattr(registry_module, "require_free", lambda *_: None)
    disk = small_disk(f"{size_kib}k")
    with real_registry(tmp_path / "registry") as place:
        name = place.push(layout.folder, "team/tool:1")
        subject = Registry(disk.path, ImagesConfig(insecure_registries=(place.host,)))
        resolved = subject.resolve(name)
        with pytest.raises(StorageFull, match=r"no room for image|full disk"):
            subject.pull(resolved, None, quiet)
        folder = disk.path / "images"
        assert [path.name for path in folder.iterdir()] == ["blobs"], "notes or credentials stayed"
        for blob in subject.blobs.folder.rglob("*"):
            if blob.is_file():
                assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name, "half a blob lies under the name of a whole one"
        if is_foreseen:
            assert place.blobs_served() == 0
        disk.resize("60m")
        image = subject.pull(resolved, None, quiet)
    assert all(image.blobs.is_complete(blob.digest, blob.size_bytes) for blob in image.manifest.layers)


def test_an_archive_that_does_not_fit(layout: Layout, tmp_path: Path, small_disk: Disks) -> None:
    archive = tmp_path / "image.tar"
    tool("tar", "-C", layout.folder, "-cf", archive, ".")
    disk = small_disk("3m")
    with pytest.raises(StorageFull, match="no room for the unpacked archive"):
        load_archive(archive, disk.path / "work", "image", Platform(), 1 << 30)
    (tmp_path / "root.tar").write_bytes(LAYERS[0] + LAYERS[1])
    with pytest.raises(StorageFull, match="no room for the unpacked archive"):
        load_archive(tmp_path / "root.tar", disk.path / "work", "root", Platform(), 1 << 30)
