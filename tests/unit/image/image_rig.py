"""Images made by hand, and two views of what is in them: what `umoci unpack` shows, and what the kernel sees on the converted disk."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import stat
import struct
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.config.schema import ImagesConfig
from agentenv.host import native
from agentenv.image.convert import Converter

DISK_MB = 256
MTIME_S = 1_700_000_000
CONVERTED = {"gzip": gzip.compress, "none": bytes, "zstd": lambda data: tool("zstd", "-q", "-c", stdin=data)}
SUFFIX = {"gzip": "+gzip", "none": "", "zstd": "+zstd"}


def tool(*argv: str | Path, stdin: bytes | None = None) -> bytes:
    return subprocess.run([str(word) for word in argv], input=stdin, check=True, capture_output=True, timeout=120).stdout


def member(name: str, content: bytes | str = b"", *, kind: bytes = tarfile.REGTYPE, xattrs: dict[str, bytes] | None = None, **facts: Any):
    """One member of a layer: a TarInfo and its content. `content` of a link is its target."""
    info = tarfile.TarInfo(name)
    info.type, info.mtime, info.mode = kind, MTIME_S, 0o755 if kind == tarfile.DIRTYPE else 0o644
    if xattrs:
        info.pax_headers = {f"SCHILY.xattr.{key}": value.decode("utf-8", "surrogateescape") for key, value in xattrs.items()}
    for key, value in facts.items():
        setattr(info, key, value)
    if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        info.linkname = str(content)
        return info, b""
    data = content.encode() if isinstance(content, str) else content
    info.size = len(data)
    return info, data


def folder(name: str, **facts: Any):
    return member(name, kind=tarfile.DIRTYPE, **facts)


def symlink(name: str, target: str, **facts: Any):
    return member(name, target, kind=tarfile.SYMTYPE, **facts)


def hard_link(name: str, target: str):
    return member(name, target, kind=tarfile.LNKTYPE)


def layer(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, encoding="utf-8", errors="surrogateescape") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return out.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Layout:
    """An OCI layout with one image."""

    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, layers: Sequence[bytes], packing: str = "gzip", run: dict[str, Any] | None = None) -> Layout:
        layout = cls(folder)
        entries = [layout.blob(CONVERTED[packing](tar), f"application/vnd.oci.image.layer.v1.tar{SUFFIX[packing]}") for tar in layers]
        rootfs = {"type": "layers", "diff_ids": [digest_of(tar) for tar in layers]}
        config = {"architecture": "amd64", "os": "linux", "config": run or {}, "rootfs": rootfs}
        of_config = layout.blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json")
        kind = "application/vnd.oci.image.manifest.v1+json"
        layout.manifest = {"schemaVersion": 2, "mediaType": kind, "config": of_config, "layers": entries}
        entry = layout.blob(json.dumps(layout.manifest).encode(), kind)
        layout.write_index([entry | {"annotations": {"org.opencontainers.image.ref.name": "image"}}])
        return layout

    def blob(self, data: bytes, kind: str) -> dict[str, Any]:
        digest = digest_of(data)
        path = self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    def write_index(self, entries: list[dict[str, Any]]) -> None:
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))


class FolderOfLayers:
    """Stands in for the layer store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, layer_id: str) -> Path:
        return self.folder / f"{layer_id}.lsmt"

    @contextlib.contextmanager
    def announced(self, *_layer_ids: str) -> Iterator[None]:
        yield


def converter(folder: Path, disk_mb: int = DISK_MB, **settings: Any) -> Converter:
    return Converter(FolderOfLayers(folder), native.program("imagefs"), ImagesConfig(**settings), disk_mb)


def quiet(*_: object) -> None:
    """A progress that shows nothing."""


def flatten(layers: Sequence[Path], image: Path, disk_mb: int = DISK_MB) -> None:
    """Read raw LSMT layers with nothing but the format's description: the last 4 KiB tell where the index is."""
    with image.open("wb") as out:
        out.truncate(disk_mb << 20)
        for path in layers:
            data = path.read_bytes()
            index_at, entries, size_bytes = struct.unpack_from("<QQQ", data, len(data) - 4096 + 32)
            assert size_bytes == disk_mb << 20
            for number in range(entries):
                low, high = struct.unpack_from("<QQ", data, index_at + number * 16)
                offset, sectors, place = low & (1 << 50) - 1, low >> 50, high & (1 << 55) - 1
                if sectors == 0:
                    continue  # padding
                out.seek(offset * 512)
                out.write(bytes(sectors * 512) if high >> 55 & 1 else data[place * 512 : (place + sectors) * 512])


def check_file_system(image: Path) -> None:
    found = subprocess.run(["e2fsck", "-fn", image], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def same_as_a_runtime(layout: Layout, layers: Sequence[Path], work: Path, disk_mb: int = DISK_MB) -> None:
    """What the kernel sees on the disk of each depth is sound, and on the whole is what `umoci unpack` shows."""
    for depth in range(1, len(layers) + 1):
        flatten(layers[:depth], work / "disk", disk_mb)
        check_file_system(work / "disk")
    tool("umoci", "unpack", "--image", f"{layout.folder}:image", work / "bundle")
    wanted = tree(work / "bundle" / "rootfs")
    with mounted(work / "disk", work / "seen") as seen:
        found = tree(seen)
    assert sorted(found) == sorted(wanted)
    made_on_the_way = {p for p in wanted if wanted[p]["mtime_ns"] != MTIME_S * 10**9}  # their time is that of the unpacking
    for path, facts in wanted.items():
        if path in made_on_the_way:
            facts = facts | {"mtime_ns": found[path]["mtime_ns"]}
        assert found[path] == facts, path


@contextlib.contextmanager
def mounted(image: Path, place: Path) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    tool("mount", "-o", "loop,ro,noload", image, place)
    try:
        yield place
    finally:
        tool("umount", place)


def tree(root: Path) -> dict[str, dict[str, Any]]:
    """Everything a program can see of a tree, by path."""
    found: dict[str, dict[str, Any]] = {}
    names: dict[int, list[str]] = {}
    top = os.fsencode(root)
    for place, folders, files in os.walk(top):
        for name in [b"."] if place == top else []:
            found["."] = _facts(os.path.join(place, name))
        for name in folders + files:
            path = os.path.join(place, name)
            shown = os.fsdecode(os.path.relpath(path, top))
            if shown == "lost+found":
                continue
            found[shown] = _facts(path)
            if not os.path.isdir(path) or os.path.islink(path):
                names.setdefault(os.lstat(path).st_ino, []).append(shown)
        if place == top:
            folders[:] = [name for name in folders if name != b"lost+found"]
    for same in names.values():
        for shown in same:
            found[shown]["names"] = sorted(same)
    return found


def _facts(path: bytes) -> dict[str, Any]:
    seen = os.lstat(path)
    facts: dict[str, Any] = {"mode": oct(seen.st_mode), "owner": (seen.st_uid, seen.st_gid), "mtime_ns": seen.st_mtime_ns}
    facts["xattrs"] = {name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)}
    if stat.S_ISLNK(seen.st_mode):
        facts["target"] = os.readlink(path)
    elif stat.S_ISREG(seen.st_mode):
        facts["size"] = seen.st_size
        with open(path, "rb") as content:
            facts["sha256"] = hashlib.file_digest(content, "sha256").hexdigest()
    elif stat.S_ISCHR(seen.st_mode) or stat.S_ISBLK(seen.st_mode):
        facts["device"] = seen.st_rdev
    return facts
