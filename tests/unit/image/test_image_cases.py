"""Field reports about conversion, each class with cases that vary it: whiteouts of every kind and order, attributes, and sizes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_rig import (
    MTIME_S,
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
)

from agentenv.core.images import Platform
from agentenv.image.archives import load_folder

CAPABILITY = struct.pack("<IIIII", 0x02000000 | 1, 1 << 13, 0, 0, 0)  # cap_net_raw+ep
CAPABILITY_3 = struct.pack("<IIIIII", 0x03000000 | 1, 1 << 13, 0, 0, 0, 100_000)  # of a user namespace
NOBODY = 2**32 - 1
ACL_ENTRIES = ((1, 6, NOBODY), (2, 4, 1000), (4, 4, NOBODY), (16, 4, NOBODY), (32, 0, NOBODY))  # owner, user 1000, group, mask, others
ACL = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in ACL_ENTRIES)
MIB, GIB = 1 << 20, 1 << 30

BELOW = layer(
    folder("d", mode=0o711),
    member("d/a", "a"),
    member("d/b", "b"),
    folder("d/sub"),
    member("d/sub/c", "c"),
    member("x", "x"),
    member("other", "other"),
    folder("kept"),
    member("kept/k", "k"),
)
WHITEOUTS = {
    "a regular file": member(".wh.x"),
    "a regular file that is not empty": member(".wh.x", "content"),
    "a hard link": hard_link(".wh.x", "other"),
    "a symbolic link": symlink(".wh.x", "other"),
    "a folder": folder(".wh.x"),
    "a device": member(".wh.x", kind=tarfile.CHRTYPE, devmajor=0, devminor=0),
    "named from the root": member("/.wh.x"),
    "named from here": member("./.wh.x"),
}
ORDERS = {
    "deleted, and there again in the next layer": (layer(member(".wh.x")), layer(member("x", "again", mode=0o600))),
    "opaque, with files of this layer and of the next": (
        layer(folder("d", mode=0o700), member("d/.wh..wh..opq"), member("d/new", "new")),
        layer(member("d/newer", "newer"), member("d/a", "a of the third")),
    ),
    "opaque said after its siblings": (layer(folder("d"), member("d/new", "new"), member("d/.wh..wh..opq")),),
    "a whiteout after its sibling of the same layer": (layer(member("d/new", "new"), member("d/.wh.new"), member("d/.wh.a")),),
    "a folder gone, a file of its name": (layer(member(".wh.d"), member("d", "a file now")),),
    "a folder gone, a folder of its name": (layer(member(".wh.d"), folder("d"), member("d/only", "only")),),
    "a folder gone in one layer, a folder of its name in the next": (layer(member(".wh.d")), layer(folder("d"), member("d/only", "only"))),
    "a file gone in a folder that is gone later": (layer(member("d/sub/.wh.c")), layer(member(".wh.d"))),
    "opaque at the root": (layer(member(".wh..wh..opq"), member("fresh", "fresh")),),
    "opaque below a whiteout": (layer(member("d/.wh.sub")), layer(folder("d/sub"), member("d/sub/.wh..wh..opq"), member("d/sub/e", "e"))),
    "a whiteout of what was never there": (layer(member("d/.wh.nothing"), member("no/such/.wh.folder")),),
    "twice the same": (layer(member(".wh.x"), member(".wh.x")), layer(member(".wh.x"))),
}


async def converted(work: Path, layers: tuple[bytes, ...]) -> list[Path]:
    image = load_folder(Layout.make(work / "layout", layers, "none").folder, "test", Platform())
    made = await converter(work / "layers").convert(image, quiet)
    return [work / "layers" / f"{layer_id}.lsmt" for layer_id in made.layer_ids]


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("kind", WHITEOUTS)
async def test_a_whiteout_is_one_by_its_name_whatever_it_is(kind: str, tmp_path: Path) -> None:
    """F07."""
    files = await converted(tmp_path, (BELOW, layer(WHITEOUTS[kind])))
    flatten(files, tmp_path / "disk")
    check_file_system(tmp_path / "disk")
    with mounted(tmp_path / "disk", tmp_path / "seen") as seen:
        assert sorted(path.name for path in seen.iterdir()) == ["d", "kept", "lost+found", "other"]
        assert (seen / "other").read_text() == "other"
        assert (seen / "other").stat().st_nlink == 1


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("order", ORDERS)
async def test_whiteouts_count_layer_by_layer(order: str, tmp_path: Path) -> None:
    """F08."""
    files = await converted(tmp_path, (BELOW, *ORDERS[order]))
    same_as_a_runtime(Layout(tmp_path / "layout"), files, tmp_path)


@pytest.mark.usefixtures("root")
async def test_attributes_and_modes_are_kept(tmp_path: Path) -> None:
    """F05: capabilities of both versions, ACLs, labels, attributes of users; also of what a later layer writes again or links."""
    attributes = {
        "ping": {"security.capability": CAPABILITY},
        "rooted": {"security.capability": CAPABILITY_3},
        "shared": {"system.posix_acl_access": ACL},
        "labelled": {"security.selinux": b"system_u:object_r:bin_t:s0\0", "user.note": b"kept", "trusted.note": b"\0\1"},
    }
    first = layer(
        folder("usr/bin"),
        folder("tmp", mode=0o1777),
        folder("srv", mode=0o2775, gid=50, xattrs={"user.of": b"a folder"}),
        member("usr/bin/sudo", "sudo", mode=0o4755),
        *(member(f"usr/bin/{name}", name, mode=0o755, xattrs=xattrs) for name, xattrs in attributes.items()),
    )
    second = layer(
        hard_link("usr/bin/ping6", "usr/bin/ping"),
        member("usr/bin/rooted", "another", mode=0o755, xattrs={"security.capability": CAPABILITY}),
        member("usr/bin/labelled", "without any", mode=0o2711),
    )
    files = await converted(tmp_path, (first, second))
    flatten(files, tmp_path / "disk")
    check_file_system(tmp_path / "disk")
    with mounted(tmp_path / "disk", tmp_path / "seen") as seen:

        def has(name: str) -> dict[str, bytes]:
            path = seen / name
            return {key: os.getxattr(path, key) for key in os.listxattr(path) if key not in ("system.posix_acl_access",)}

        assert has("usr/bin/ping") == has("usr/bin/ping6") == {"security.capability": CAPABILITY}
        assert has("usr/bin/rooted") == {"security.capability": CAPABILITY}
        assert has("usr/bin/labelled") == {}
        assert os.getxattr(seen / "usr/bin/shared", "system.posix_acl_access") == ACL
        assert has("srv") == {"user.of": b"a folder"}
        modes = {name: oct((seen / name).stat().st_mode & 0o7777) for name in ("tmp", "srv", "usr/bin/sudo", "usr/bin/labelled")}
        assert modes == {"tmp": "0o1777", "srv": "0o2775", "usr/bin/sudo": "0o4755", "usr/bin/labelled": "0o2711"}
    flatten(files[:2], tmp_path / "disk")
    with mounted(tmp_path / "disk", tmp_path / "seen") as seen:
        for name, xattrs in attributes.items():
            assert {key: os.getxattr(seen / "usr/bin" / name, key) for key in xattrs} == xattrs


# --- sizes

DISK_MB = 16 << 10
ENTRIES = 100_000
MARK = b"here"


def large_layer(path: Path) -> None:
    """An uncompressed archive whose file has holes where the content is zeros: a large folder, and plain files past 2 and 4 GiB."""
    with path.open("wb") as out:

        def add(name: str, parts: dict[int, bytes], size_bytes: int, **facts: int | bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = size_bytes, MTIME_S
            for key, value in facts.items():
                setattr(info, key, value)
            out.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
            start = out.tell()
            for offset, data in parts.items():
                out.seek(start + offset)
                out.write(data)
            out.seek(start + -(-size_bytes // 512) * 512)

        add("before", {0: b"first of all"}, 12)
        add("many", {}, 0, type=tarfile.DIRTYPE, mode=0o755)
        for number in range(ENTRIES):
            add(f"many/{number:06}-{'n' * 248}", {}, 0)
        add("/".join(f"level-{depth}" for depth in range(60)), {0: b"deep"}, 4)
        for name, size_bytes in LARGE_FILES.items():
            add(name, marks(size_bytes), size_bytes)
            add(f"after-{name}", {0: name.encode()}, len(name))
        out.truncate(out.tell() + 1024)


LARGE_FILES = {"of-2.3-GiB": 2_469_606_195, "of-5-GiB": 5 * GIB + 1}


def marks(size_bytes: int) -> dict[int, bytes]:
    """Words at the ends and around the boundaries that offsets of 31 and 32 bits, and blocks of extents, end at."""
    places = [0, 128 * MIB - 2, GIB - 1, 2 * GIB - 2, 2 * GIB + 4096, 4 * GIB - 2, 4 * GIB + 7, size_bytes - 4]
    return {place: MARK for place in places if place + 4 <= size_bytes}


def large_layout(work: Path, tar: Path) -> Layout:
    """A layout around an archive too large for memory."""
    layout = Layout.make(work / "layout", (layer(),), "none")
    with tar.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    size_bytes = tar.stat().st_size
    tar.rename(layout.folder / "blobs" / "sha256" / digest)
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}
    manifest = layout.manifest | {
        "config": layout.blob(json.dumps(config).encode(), layout.manifest["config"]["mediaType"]),
        "layers": [layout.manifest["layers"][0] | {"digest": f"sha256:{digest}", "size": size_bytes}],
    }
    layout.write_index([layout.blob(json.dumps(manifest).encode(), manifest["mediaType"])])
    return layout


def data_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The parts of a file that are not holes."""
    with path.open("rb", buffering=0) as content:
        end, at = content.seek(0, os.SEEK_END), 0
        while at < end:
            try:
                start = os.lseek(content.fileno(), at, os.SEEK_DATA)
            except OSError:
                return
            at = os.lseek(content.fileno(), start, os.SEEK_HOLE)
            yield start, os.pread(content.fileno(), at - start, start)


@pytest.mark.usefixtures("root")
async def test_large_folders_and_files_are_whole_and_shift_nothing_after_them(tmp_path: Path) -> None:
    """F10 at its full size: 100,000 names of 255 bytes, depth 60, plain files of 2.3 and 5 GiB with others before and after them.

    The sparse one of 100 GiB is in `test_image_convert`.
    """
    large_layer(tmp_path / "layer.tar")
    layout = large_layout(tmp_path, tmp_path / "layer.tar")
    made = await converter(tmp_path / "layers", disk_mb=DISK_MB).convert(load_folder(layout.folder, "test", Platform()), quiet)
    assert made.layers[1].size_bytes < 100 * MIB, "zeros were stored"
    files = [tmp_path / "layers" / f"{layer_id}.lsmt" for layer_id in made.layer_ids]
    flatten(files, tmp_path / "disk", DISK_MB)
    check_file_system(tmp_path / "disk")
    with mounted(tmp_path / "disk", tmp_path / "seen") as seen:
        assert sum(1 for _ in os.scandir(seen / "many")) == ENTRIES
        for number in (0, 1, ENTRIES // 2, ENTRIES - 1):
            assert (seen / "many" / f"{number:06}-{'n' * 248}").stat().st_size == 0
        assert (seen / "before").read_text() == "first of all"
        assert (seen / "/".join(f"level-{depth}" for depth in range(60))).read_text() == "deep"
        for name, size_bytes in LARGE_FILES.items():
            assert (seen / f"after-{name}").read_text() == name
            assert (seen / name).stat().st_size == size_bytes
            wanted = marks(size_bytes)
            for start, data in data_of(seen / name):
                inside = {place: word for place, word in wanted.items() if place < start + len(data) and place + 4 > start}
                shown = bytearray(len(data))
                for place, word in inside.items():
                    for number, byte in enumerate(word):
                        if 0 <= place + number - start < len(data):
                            shown[place + number - start] = byte
                assert data == bytes(shown), f"{name} at {start}"
            with (seen / name).open("rb") as content:
                for place, word in wanted.items():
                    assert os.pread(content.fileno(), 4, place) == word, f"{name} at {place}"
