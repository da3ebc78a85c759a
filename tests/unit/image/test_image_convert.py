"""Converted layers: what is on the disk is what a container runtime shows, always the same bytes, whatever the archive tries."""

from __future__ import annotations

import os
import random
import struct
import tarfile
from pathlib import Path

import pytest
from image_rig import (
    Layout,
    check_file_system,
    converter,
    flatten,
    folder,
    hard_link,
    layer,
    member,
    mounted,
    quiet,
    same_as_a_runtime,
    symlink,
    tool,
)

from agentenv.core.errors import DataCorrupt, InvalidInput
from agentenv.core.images import Platform
from agentenv.host.asset_cache import sha256_file
from agentenv.image.archives import load_folder

CAPABILITY = struct.pack("<IIIII", 0x02000000 | 1, 1 << 13, 0, 0, 0)  # cap_net_raw+ep
NOISE = random.Random(7).randbytes(3_000_000)

USUAL = (
    layer(
        folder("./", mode=0o755),
        folder("usr/"),
        folder("usr/bin/"),
        symlink("bin", "usr/bin"),
        member("bin/tool", NOISE, mode=0o4755),
        member("etc/config", "one\n", uid=1000, gid=70_000),
        member("etc/odd", "x", uid=4_294_967_294, gid=4_000_000_000),
        hard_link("etc/same", "etc/config"),
        folder("tmp", mode=0o1777),
        member("sbin/ping", "ping", mode=0o755, xattrs={"security.capability": CAPABILITY, "user.note": b"kept"}),
        member("long-attributes", "a", xattrs={"user.a": b"v" * 900, "user.b": b"w" * 700}),
        member("dev/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
        member("dev/large", kind=tarfile.BLKTYPE, devmajor=259, devminor=70_000),
        member("run/pipe", kind=tarfile.FIFOTYPE),
        symlink("far", "/" + "deep/" * 30),
        member("n" * 255, "long name"),
        member("/".join(f"level-{depth}" for depth in range(60)), "deep"),
        member("name with \n and ü", "odd name"),
        member("zeros", bytes(200_000) + b"end"),
        member("empty"),
        folder("old"),
        member("old/a", "a"),
        member("old/b", "b"),
        folder("gone"),
        member("gone/x", "x"),
        member("kind", "file"),
        folder("kinds"),
        member("kinds/a", "a"),
    ),
    layer(
        member("etc/.wh.config"),
        member("old/.wh..wh..opq"),
        member("old/new", "new"),
        hard_link("again", "etc/same"),
        hard_link("bin/.wh.tool", "etc/same"),  # a whiteout by its name, whatever it is
        member(".wh.gone"),
        folder("kind"),
        member("kind/inside", "now a folder"),
        member("kinds", "now a file"),
        folder("usr/", mode=0o750, uid=5, xattrs={"user.of": b"a folder"}),
        member("sbin/ping", "another"),
        member(".wh.not-there"),
    ),
    layer(
        member("gone/y", "back again", mode=0o600),
        folder("old/"),
        member("old/last", "last"),
        member("old/.wh.last"),  # after its sibling of the same layer: spares it
        symlink("usr/bin/link", "../../etc"),
        member("usr/bin/link/through", "into etc"),
    ),
)
# More names than one level of a directory's index holds.
LARGE = (layer(folder("many"), *(member(f"many/{'long-' * 39}{n}", str(n) if n % 1000 == 0 else "") for n in range(8200))),)
CASES = {"usual": USUAL, "large": LARGE, "empty": (layer(), b"")}


async def _convert(work: Path, layers, packing: str = "gzip", **settings):
    image = load_folder(Layout.make(work / "layout", layers, packing).folder, "test", Platform())
    return await converter(work / "layers", **settings).convert(image, quiet)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("case", CASES)
async def test_the_disk_shows_what_a_runtime_shows(case: str, tmp_path: Path) -> None:
    """E07, F05, F07, F08: a sound file system, and of whiteouts, links, owners and attributes nothing else than a runtime shows."""
    converted = await _convert(tmp_path, CASES[case])
    files = [tmp_path / "layers" / f"{layer_id}.lsmt" for layer_id in converted.layer_ids]
    same_as_a_runtime(Layout(tmp_path / "layout"), files, tmp_path)


async def test_the_same_layers_are_the_same_files_however_they_are_packed(tmp_path: Path) -> None:
    digests = []
    for packing in ("none", "gzip", "zstd"):
        converted = await _convert(tmp_path / packing, USUAL, packing)
        digests.append([sha256_file(tmp_path / packing / "layers" / f"{name}.lsmt") for name in converted.layer_ids])
    assert digests[0] == digests[1] == digests[2]


async def test_images_share_what_they_begin_with(tmp_path: Path) -> None:
    first = await _convert(tmp_path, USUAL)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "layers").glob("*.lsmt")}
    second = await _convert(tmp_path, (*USUAL[:2], layer(member("other", "x"))))
    assert first.layer_ids[:3] == second.layer_ids[:3]
    assert first.layer_ids[3] != second.layer_ids[3]
    assert len(list((tmp_path / "layers").glob("*.lsmt"))) == len(before) + 1
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())


async def test_a_layer_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    first = await _convert(tmp_path, USUAL)
    damaged = tmp_path / "layers" / f"{first.layer_ids[1]}.lsmt"
    os.truncate(damaged, 5000)
    assert (await _convert(tmp_path, USUAL)).layers == first.layers
    assert damaged.stat().st_size == first.layers[1].size_bytes


@pytest.mark.usefixtures("root")
async def test_huge_and_sparse_files_keep_their_content_and_take_little_room(tmp_path: Path) -> None:
    # As GNU tar writes them: 100 GiB of holes with a word at either end, then a file whose place must not be lost.
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as out:
        out.write(b"begin")
        out.seek((100 << 30) - 3)
        out.write(b"end")
    (source / "zz").write_text("after")
    for number, kind in enumerate(("gnu", "posix")):
        tar = tool("tar", f"--format={kind}", "--sparse", "-C", source, "-c", "sparse", "zz")
        work = tmp_path / str(number)
        converted = await _convert(work, (tar,))
        assert converted.layers[1].size_bytes < 1 << 20
        flatten([work / "layers" / f"{name}.lsmt" for name in converted.layer_ids], work / "disk")
        check_file_system(work / "disk")
        with mounted(work / "disk", work / "seen") as seen, (seen / "sparse").open("rb") as content:
            assert content.read(6) == b"begin\0"
            content.seek((100 << 30) - 4)
            assert content.read() == b"\0end"
            assert (seen / "zz").read_text() == "after"


def _bomb() -> bytes:
    return layer(member("zeros", bytes(70 << 20)))


@pytest.mark.parametrize(
    ("tar", "settings", "words"),
    [
        (lambda: layer(member("x", b"1" * (2 << 20))), {"layer_max_mb": 1}, "more than 1048576 bytes"),
        (lambda: layer(*(member(f"f{n}") for n in range(11))), {"layer_max_entries": 10}, "more than 10 entries"),
        (_bomb, {"layer_max_ratio": 100}, "100 times its size"),
        (lambda: layer(member("x", random.Random(1).randbytes(1 << 20) * 80)), {"disk_mb": 140}, "does not fit on a disk"),
        (lambda: layer(member("x"))[:700], {}, "malformed archive"),
        (lambda: b"no archive at all" * 100, {}, "malformed archive"),
        (lambda: layer(hard_link("a", "missing")), {}, "no such file"),
        (lambda: layer(member("a"), member("a/b")), {}, "should be a directory"),
        (lambda: layer(symlink("a", "b"), symlink("b", "a"), member("a/c")), {}, "too many symbolic links"),
        (lambda: layer(member("x/" + "n" * 256)), {}, "longer than 255"),
        (lambda: layer(member("x", xattrs={"user.big": b"v" * 5000})), {}, "extended attributes"),
    ],
    ids=["bytes", "entries", "ratio", "disk", "cut", "no-tar", "link", "not-a-folder", "loop", "name", "xattrs"],
)
async def test_what_cannot_be_is_refused_and_leaves_nothing(tar, settings, words, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=words):
        await _convert(tmp_path, (tar(),), **settings)
    made = {path.name.split("-")[0] for path in (tmp_path / "layers").iterdir()}
    assert made == {"ext4"}


async def test_nothing_outside_the_disk_is_reached(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("mine")
    hostile = layer(
        member("../../outside/secret", "overwritten"),
        symlink("out", str(outside)),
        member("out/planted", "x"),
        symlink("up", "../../../../.."),
        member(f"up{outside}/planted", "x"),
        member(f"{outside}/.wh.secret"),
    )
    await _convert(tmp_path, (hostile,))
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"secret": "mine"}


async def test_a_blob_with_another_content_is_refused(tmp_path: Path) -> None:
    layout = Layout.make(tmp_path / "layout", (layer(member("a", "a")),), "none")
    blob = tmp_path / "layout" / "blobs" / "sha256" / layout.manifest["layers"][0]["digest"].removeprefix("sha256:")
    blob.write_bytes(layer(member("a", "b")))
    image = load_folder(layout.folder, "test", Platform())
    with pytest.raises(DataCorrupt, match="checksum"):
        await converter(tmp_path / "layers").convert(image, quiet)
