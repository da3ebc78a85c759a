"""A folder of things that are costly to make and never change once made (kernel, QEMU, root file system).

    <cache>/assets/<name>/...             the files, as `build` left them
    <cache>/assets/<name>/manifest.json   {"format": 1, "facts": {...}, "files": {"<path>": {"size_bytes", "mtime_ns",
                                          "sha256" or, for disk images, "sha256_nonzero"}, or {"link"}}}
    <cache>/assets/.<name>.lock           held while one is made
    <cache>/assets/.<name>.new-*          one being made; a leftover of a crash is removed by the next build

Invariants: `<name>` appears by one rename, complete or not at all; the manifest names every regular file and link in it; one that does
not match its manifest is never handed out, it is made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.core.errors import DeadlineExceeded, InvalidInput, StorageFull

MANIFEST = "manifest.json"
FORMAT = 1
LOCK_TIMEOUT_S = 3600.0
"""How long to wait for another process that makes the same asset: the longest build (a root file system on a slow line)."""
LOCK_POLL_S = 0.2
_REMOVE_LOCK_S = 5.0
DISK_IMAGE_BYTES = 1 << 30
"""Files from this size on are taken for disk images: see `sha256_nonzero`. By size alone, so that a copy is judged alike."""
PIECE_BYTES = 64 << 10

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Asset:
    """A finished asset. The cache owns `path`; users only read it."""

    path: Path
    facts: Facts
    checksums: Mapping[str, str]
    """File name to sha256 (see `sha256_nonzero` for disk images)."""


class AssetCache:
    """Assets below `<cache>/assets`."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache.resolve()
        self.folder = self.cache / "assets"

    def find(self, name: str, *, verify: bool = False) -> Asset | None:
        """The asset `name` if it is there and undamaged. Compares sizes and times; with `verify` every sha256."""
        path = self.folder / name
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())
            intact = manifest["format"] == FORMAT and _matches(path, manifest["files"], verify=verify)
            return _asset(path, manifest) if intact else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # any unreadable manifest means: make it again

    def candidates(self, prefix: str) -> list[Asset]:
        """Undamaged assets whose name starts with `prefix`, newest first."""
        if not self.folder.is_dir():
            return []
        paths = [path for path in self.folder.iterdir() if path.name.startswith(prefix) and (path / MANIFEST).is_file()]
        paths.sort(key=lambda path: (path / MANIFEST).stat().st_mtime_ns, reverse=True)
        return [asset for asset in map(self.find, (path.name for path in paths)) if asset]

    def listed(self) -> list[tuple[Path, float, int]]:
        """Every asset there is, damaged or not: its folder, when it was made (seconds), what it takes on disk (bytes). Blocks."""
        found = []
        for path in sorted(self.folder.glob("[!.]*")) if self.folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                made_at_s = (path / MANIFEST).stat().st_mtime
                found.append((path, made_at_s, sum(entry.lstat().st_blocks * 512 for entry in path.rglob("*"))))
        return found

    def remove(self, name: str) -> None:
        """Remove an asset; whoever makes it at this moment is waited for. One that is gone is fine. DeadlineExceeded. Blocks."""
        with file_lock(self.folder / f".{name}.lock", timeout_s=_REMOVE_LOCK_S):
            gone = self.folder / f".{name}.new-removed"
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).rename(gone)  # from here on nobody finds it; a crash leaves what the next build removes
            shutil.rmtree(gone, ignore_errors=True)

    def ensure(self, name: str, build: Callable[[Path], Facts], *, verify: bool = False) -> Asset:
        """The asset `name`, made by `build(empty folder) -> facts` when it is missing or damaged.

        One process makes it, others wait. Facts must be JSON. Raises what `build` raises, leaving nothing behind.
        """
        if not name or name.startswith(".") or "/" in name:
            raise InvalidInput(f"not an asset name: {name!r}")
        if found := self.find(name, verify=verify):
            return found
        self.folder.mkdir(parents=True, exist_ok=True)
        with file_lock(self.folder / f".{name}.lock"):
            if found := self.find(name, verify=verify):
                return found
            for leftover in self.folder.glob(f".{name}.new-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{name}.new-", dir=self.folder))
            try:
                work.chmod(0o755)
                facts = build(work)
                manifest = _write_manifest(work, facts)
                final = self.folder / name
                if final.exists():
                    shutil.rmtree(final)
                work.rename(final)
                _sync(self.folder)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise StorageFull(f"no room below {self.folder} to make {name}", "free some space or move the cache") from error
                raise
            finally:
                shutil.rmtree(work, ignore_errors=True)
            return _asset(final, manifest)


@contextmanager
def file_lock(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold an exclusive lock on `path` (made if missing). Freed by the kernel when this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as held:
        end = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise DeadlineExceeded(
                        f"another process has held {path} for {timeout_s:g} s", "see what it is doing, then retry"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


def sha256_file(path: Path) -> str:
    """The sha256 of a file's content, as hex."""
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def sha256_nonzero(path: Path) -> str:
    """The sha256 of every 64 KiB piece that is not all zero, each preceded by its offset as 8 bytes, little-endian.

    For disk images: the same whether zeros are stored or are holes, and a mostly empty one costs what it holds.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as content:
        end, position = os.fstat(content.fileno()).st_size, 0
        while position < end:
            try:
                data = os.lseek(content.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break  # nothing but a hole up to the end
                raise
            position = data - data % PIECE_BYTES
            piece = os.pread(content.fileno(), PIECE_BYTES, position)
            if piece.count(0) != len(piece):
                digest.update(position.to_bytes(8, "little") + piece)
            position += PIECE_BYTES
    return digest.hexdigest()


def digest_of(inputs: Mapping[str, Any]) -> str:
    """A short stable name for a set of inputs: 16 hex digits of the sha256 of their canonical JSON."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def _entries(path: Path) -> Iterator[Path]:
    for found in sorted(path.rglob("*")):
        if (found.is_symlink() or found.is_file()) and found != path / MANIFEST:
            yield found


def _describe(path: Path) -> dict[str, Any]:
    if path.is_symlink():
        return {"link": str(path.readlink())}
    facts = path.stat()
    return {"size_bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns, **_checksum(path, facts.st_size)}


def _checksum(path: Path, size_bytes: int) -> dict[str, str]:
    if size_bytes >= DISK_IMAGE_BYTES:
        return {"sha256_nonzero": sha256_nonzero(path)}
    return {"sha256": sha256_file(path)}


def _asset(path: Path, manifest: Mapping[str, Any]) -> Asset:
    checksums = {name: entry.get("sha256") or entry["sha256_nonzero"] for name, entry in manifest["files"].items() if "link" not in entry}
    return Asset(path, manifest["facts"], checksums)


def _write_manifest(path: Path, facts: Facts) -> dict[str, Any]:
    files = {str(entry.relative_to(path)): _describe(entry) for entry in _entries(path)}
    for entry in _entries(path):
        if not entry.is_symlink():
            _sync(entry)
    manifest = {"format": FORMAT, "facts": dict(facts), "files": files}
    with open(path / MANIFEST, "w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=1, sort_keys=True)
        out.flush()
        os.fsync(out.fileno())
    return manifest


def _matches(path: Path, files: Mapping[str, Mapping[str, Any]], *, verify: bool) -> bool:
    """Whether the listed files are as recorded. A file whose time differs (a copied cache) is judged by its sha256."""
    for name, expected in files.items():
        entry = path / name
        if "link" in expected:
            if str(entry.readlink()) != expected["link"]:
                return False
            continue
        facts = entry.stat()
        if facts.st_size != expected["size_bytes"]:
            return False
        if verify or facts.st_mtime_ns != expected["mtime_ns"]:
            checksum = _checksum(entry, facts.st_size)
            if checksum != {key: value for key, value in expected.items() if key.startswith("sha256")}:
                return False
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
