"""Images brought as files: an OCI layout (folder or archive), a `docker save` archive, a root file system in one archive.

Archives are hostile. Nothing of them is unpacked under a name of theirs: regular members become blobs named by their own
checksum, links are followed inside the archive only, and what is taken in is bounded.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from agentenv.core.errors import InvalidInput
from agentenv.core.images import ImageConfig, Platform
from agentenv.host.files import storage_full
from agentenv.image import manifest as manifests
from agentenv.image.blobs import BlobFolder
from agentenv.image.manifest import Descriptor, Manifest
from agentenv.image.registry import LocalImage

_MEMBERS_MAX = 10_000  # an archive of an image has a few for each layer; a root file system is never looked through further
_LINKS_MAX = 8
_PIECE_BYTES = 1 << 20
_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_MARKS = ("manifest.json", "index.json", "oci-layout")


def load_folder(folder: Path, name: str, platform: Platform) -> LocalImage:
    """The image of an OCI layout. The folder stays the caller's; its blobs are used in place. InvalidInput, DataCorrupt."""
    index = folder / "index.json"
    if not index.is_file():
        raise InvalidInput(f"{folder} is no OCI layout: it has no index.json", "name the folder that `skopeo copy ... oci:FOLDER` wrote")
    with index.open("rb") as content:
        raw = content.read(manifests.MANIFEST_BYTES_MAX + 1)
    return _of_layout(raw, BlobFolder(folder / "blobs"), name, platform)


def load_archive(archive: Path, work: Path, name: str, platform: Platform, limit_bytes: int) -> LocalImage:
    """The image in an archive of any of the kinds above; its blobs go below `work`, which is the caller's to remove.

    A root file system is an image of one layer that says nothing about running it. InvalidInput, DataCorrupt.
    """
    blobs = BlobFolder(work / "blobs")
    contents = _Contents(limit_bytes)
    try:
        with tarfile.open(archive, mode="r:*") as source:
            if not contents.is_image(source):
                return _rootfs(archive, blobs, name)
            contents.take(source, blobs)
    except (tarfile.TarError, EOFError, OSError) as error:
        if _is_zstd(archive):  # this Python reads no zstd, the converter does: it can only be a root file system
            return _rootfs(archive, blobs, name)
        raise InvalidInput(f"{name} cannot be read as an archive: {error}") from error
    if "index.json" in contents.small:
        return _of_layout(contents.small["index.json"], blobs, name, platform)
    return _of_docker(contents, blobs, name, platform)


@dataclass
class _Contents:
    """What was taken from an archive."""

    limit_bytes: int
    small: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, Descriptor] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def is_image(self, source: tarfile.TarFile) -> bool:
        """Whether one of the marking files is at the root; a root file system shows by what else is there."""
        for _, member in zip(range(_MEMBERS_MAX), source, strict=False):
            path = _path(member.name)
            if path in _MARKS and member.isreg():
                return True
        return False

    def take(self, source: tarfile.TarFile, blobs: BlobFolder) -> None:
        """Every regular member becomes a blob."""
        left = self.limit_bytes
        for number, member in enumerate(source.getmembers()[: _MEMBERS_MAX + 1]):
            if number >= _MEMBERS_MAX:
                raise InvalidInput(f"the archive has more than {_MEMBERS_MAX} members")
            path = _path(member.name)
            if member.issym() or member.islnk():
                base = "" if member.islnk() else posixpath.dirname(path)
                self.links[path] = _path(posixpath.join(base, member.linkname))
            if not member.isreg():
                continue
            left -= member.size
            if left < 0:
                raise InvalidInput(f"the archive holds more than {self.limit_bytes >> 20} MiB", "see images.layer_max_mb")
            content = source.extractfile(member)
            if content is None:
                continue
            if path in _MARKS:
                self.small[path] = content.read(manifests.MANIFEST_BYTES_MAX + 1)
            else:
                self.blobs[path] = _keep(content, blobs)

    def find(self, path: Any) -> Descriptor:
        """The blob that was at `path`, links followed."""
        wanted = _path(str(path))
        for _ in range(_LINKS_MAX):
            if wanted in self.blobs:
                return self.blobs[wanted]
            if wanted not in self.links:
                break
            wanted = self.links[wanted]
        raise InvalidInput(f"the archive lacks {path}, which its manifest names")


def _is_zstd(archive: Path) -> bool:
    with archive.open("rb") as content:
        return content.read(4) == b"\x28\xb5\x2f\xfd"


def _path(name: str) -> str:
    return posixpath.normpath(name).lstrip("/")


def _keep(content: IO[bytes], blobs: BlobFolder) -> Descriptor:
    folder = blobs.folder / "sha256"
    folder.mkdir(parents=True, exist_ok=True)
    digest, size_bytes = hashlib.sha256(), 0
    with storage_full("the unpacked archive"), tempfile.NamedTemporaryFile(dir=folder, prefix=".new-", delete=False) as out:
        while piece := content.read(_PIECE_BYTES):
            digest.update(piece)
            out.write(piece)
            size_bytes += len(piece)
    Path(out.name).rename(folder / digest.hexdigest())
    return Descriptor(_LAYER_TYPE, f"sha256:{digest.hexdigest()}", size_bytes)


def _of_layout(raw: bytes, blobs: BlobFolder, name: str, platform: Platform) -> LocalImage:
    document = manifests.load(raw, f"{name}: index.json")
    entries = document.get("manifests")
    if isinstance(entries, list) and len(entries) == 1 and isinstance(entries[0], dict):
        digest = str(entries[0].get("digest"))  # a layout of one image need not say for which platform
    else:
        digest = manifests.choose(document, platform, name)
    for _ in range(manifests.INDEX_DEPTH_MAX):
        document = manifests.load(blobs.read(digest, manifests.MANIFEST_BYTES_MAX), name)
        if not manifests.is_index(document):
            break
        digest = manifests.choose(document, platform, name)
    manifest = manifests.parse_manifest(document, name)
    config = manifests.parse_config(blobs.read(manifest.config.digest, manifests.CONFIG_BYTES_MAX), manifest, platform, name)
    return LocalImage(name, digest, manifest, config, blobs)


def _of_docker(contents: _Contents, blobs: BlobFolder, name: str, platform: Platform) -> LocalImage:
    try:
        entries = json.loads(contents.small["manifest.json"])
        entry = entries[0]
        layers = tuple(contents.find(path) for path in entry["Layers"])
        config = contents.find(entry["Config"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidInput(f"{name}: its manifest.json is not that of `docker save`") from error
    if len(entries) > 1:
        raise InvalidInput(f"{name} holds {len(entries)} images", "save one image into one archive")
    manifest = Manifest(config, layers)
    parsed = manifests.parse_config(blobs.read(config.digest, manifests.CONFIG_BYTES_MAX), manifest, platform, name)
    return LocalImage(name, config.digest, manifest, parsed, blobs)


def _rootfs(archive: Path, blobs: BlobFolder, name: str) -> LocalImage:
    """The converter decompresses it and finds the checksum of what is inside; nobody states one beforehand."""
    with archive.open("rb") as content:
        layer = _keep(content, blobs)
    return LocalImage(name, layer.digest, Manifest(layer, (layer,)), ImageConfig(diff_ids=("",)), blobs)
