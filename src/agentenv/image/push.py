"""A disk of the node as an overlaybd-native image in a registry. Each layer is one blob; the registry gets those that it lacks.

    <cache>/images/packed/<layer id>.json    which blob a layer of the store has been packed into; the blob is in the blob cache

The same layers give the same blobs, so what was pushed once is not sent again, by whichever node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentenv.block.client import Written
from agentenv.core.errors import AgentEnvError, InvalidInput
from agentenv.core.images import Platform
from agentenv.core.model import Context
from agentenv.host.command import Progress
from agentenv.host.files import storage_full
from agentenv.image import manifest as manifests
from agentenv.image import native, reference
from agentenv.image.credentials import Credentials
from agentenv.image.manifest import OVERLAYBD, Descriptor
from agentenv.image.registry import Registry

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_FORMAT_VERSION = "0.1.0"  # of overlaybd's layers


class Layers(Protocol):
    """What is needed of the layer store."""

    def path(self, layer_id: str) -> Path:
        """The file of a layer."""
        ...


class Blocks(Protocol):
    """What is needed of blockd."""

    async def pack(self, layer: Path, output: Path) -> Written:
        """Write one layer as overlaybd images have it."""
        ...


@dataclass(frozen=True, slots=True)
class Disk:
    """What is published: layers of the store, bottom first, and what commands start with."""

    layers: tuple[str, ...]
    context: Context
    created: str  # RFC 3339


@dataclass(frozen=True, slots=True)
class Pushed:
    """An image in a registry."""

    reference: str
    digest: str
    layers: tuple[Descriptor, ...]


class Publisher:
    """Pushes disks. The caller keeps the sweep off their layers meanwhile."""

    def __init__(self, cache: Path, registry: Registry, layers: Layers, blocks: Blocks) -> None:
        self._folder, self._registry, self._layers, self._blocks = cache / "images", registry, layers, blocks
        self._packed = self._folder / "packed"

    async def push(self, disk: Disk, text: str, credentials: Credentials | None, progress: Progress) -> Pushed:
        """Publish a disk as the image `text` names. InvalidInput, PermissionDenied, Unavailable, StorageFull, HostNotReady."""
        target = self._registry.parse(text)
        if target.digest:
            raise InvalidInput(f"image '{text}': a push names a tag, since the digest comes of what is pushed")
        blobs = []
        for number, layer_id in enumerate(disk.layers, 1):
            progress("pack the layers", number - 1, len(disk.layers))
            blobs.append(await self._blob(layer_id))
        progress("pack the layers", len(disk.layers), len(disk.layers))
        with self._registry.blobs.using(blob.digest for blob in blobs):
            return await asyncio.to_thread(self._send, disk, blobs, target, credentials, progress)

    async def _blob(self, layer_id: str) -> Descriptor:
        """The blob of a layer; it is in the cache unless it is still in a registry."""
        path = self._layers.path(layer_id)
        if (remote := await asyncio.to_thread(native.blob_of, path)) is not None:
            return remote
        note = self._packed / f"{layer_id}.json"
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            known = json.loads(note.read_text())
            if self._registry.blobs.is_complete(known["digest"], known["size"]):
                return Descriptor(LAYER_TYPE, known["digest"], known["size"])
        return await self._pack(layer_id, path, note)

    async def _pack(self, layer_id: str, path: Path, note: Path) -> Descriptor:
        self._packed.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=self._folder, prefix=".push-"))
        try:
            if native.is_native(layer_id):  # downloaded: it is the blob itself
                blob = await asyncio.to_thread(self._copy, path, work / "blob")
            else:
                written = await self._blocks.pack(path, work / "blob")
                blob = Descriptor(LAYER_TYPE, f"sha256:{written.sha256}", written.size_bytes)
            target = self._registry.blobs.path(blob.digest)
            target.parent.mkdir(parents=True, exist_ok=True)
            (work / "blob").replace(target)
        finally:
            await asyncio.to_thread(shutil.rmtree, work, True)
        note.write_text(json.dumps({"digest": blob.digest, "size": blob.size_bytes}))
        return blob

    def _copy(self, path: Path, target: Path) -> Descriptor:
        with storage_full(f"layer {path.stem}"):
            shutil.copyfile(path, target)
        return Descriptor(LAYER_TYPE, manifests.digest_of_file(target), target.stat().st_size)

    def _send(
        self, disk: Disk, blobs: Sequence[Descriptor], target: reference.ImageReference, credentials: Credentials | None, progress: Progress
    ) -> Pushed:
        with contextlib.ExitStack() as stack, storage_full(f"image {target}"):
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder, prefix=".push-")))
            config = self._document(_config(disk, blobs), _CONFIG_TYPE)
            described = self._document(_manifest(config, blobs), _MANIFEST_TYPE)
            stack.enter_context(self._registry.blobs.using((config["digest"], described["digest"])))
            entry = described | {"annotations": {"org.opencontainers.image.ref.name": "image"}}
            (work / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
            (work / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
            progress(f"push {target}", None, None)
            self._upload(work, blobs, target, credentials)
        return Pushed(str(target), str(described["digest"]), tuple(blobs))

    def _upload(self, layout: Path, blobs: Sequence[Descriptor], target: reference.ImageReference, credentials: Credentials | None) -> None:
        elsewhere = [blob for blob in blobs if not self._registry.blobs.path(blob.digest).exists()]
        try:
            self._registry.push(layout, target, credentials)
        except AgentEnvError as error:
            if not elsewhere:
                raise
            more = f"{len(elsewhere)} of the layers are still in another registry: if this one lacks them, they must be downloaded first"
            raise type(error)(error.message, "; ".join(filter(None, (error.hint, more)))) from error

    def _document(self, content: dict[str, Any], kind: str) -> dict[str, Any]:
        """Put a document among the blobs; returns its descriptor."""
        raw = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        digest = manifests.digest_of(raw)
        path = self._registry.blobs.path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(raw)
        fresh.replace(path)
        return {"mediaType": kind, "digest": digest, "size": len(raw)}


def _config(disk: Disk, blobs: Sequence[Descriptor]) -> dict[str, Any]:
    platform, context = Platform(), disk.context
    return {
        "architecture": platform.architecture,
        "os": platform.os,
        "created": disk.created,
        "config": {
            "User": context.user,
            "WorkingDir": context.workdir,
            "Env": [f"{name}={value}" for name, value in sorted(context.env_vars.items())],
            **({"Cmd": ["/bin/sh", "-c", context.service.start]} if context.service else {}),
        },
        "rootfs": {"type": "layers", "diff_ids": [blob.digest for blob in blobs]},
    }


def _manifest(config: dict[str, Any], blobs: Sequence[Descriptor]) -> dict[str, Any]:
    layers = [
        {
            "mediaType": LAYER_TYPE,
            "digest": blob.digest,
            "size": blob.size_bytes,
            "annotations": {
                f"{OVERLAYBD}blob-digest": blob.digest,
                f"{OVERLAYBD}blob-size": str(blob.size_bytes),
                f"{OVERLAYBD}blob-fs-type": "ext4",
                f"{OVERLAYBD}version": _FORMAT_VERSION,
            },
        }
        for blob in blobs
    ]
    return {"schemaVersion": 2, "mediaType": _MANIFEST_TYPE, "config": config, "layers": layers}
