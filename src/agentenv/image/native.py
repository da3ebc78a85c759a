"""Images whose layers are layers of a disk already (overlaybd-native): nothing is converted, and little need be here.

    native-<key>     one layer, by the digest of its blob: the blob itself, or a stub that blockd reads from the registry as needed

The first line of a stub and its JSON are blockd's (`native/crates/remote/src/stub.rs`); here they are only read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentenv.block.client import RemoteBlob, Stack, Upper
from agentenv.config.schema import ImagesConfig
from agentenv.core.errors import DataCorrupt, InvalidInput
from agentenv.core.ids import new_layer_id
from agentenv.core.images import ImageLayer
from agentenv.host.command import Progress
from agentenv.host.files import storage_full
from agentenv.image.blobs import BlobFolder
from agentenv.image.credentials import Credentials
from agentenv.image.helper_logins import HelperLogins
from agentenv.image.manifest import Descriptor
from agentenv.image.reference import ImageReference
from agentenv.image.repository import repository_of

_PREFIX = "native-"
_STUB = b"AgentENV remote layer 1\n"
_STUB_BYTES_MAX = 16 << 10
_PIECE_BYTES = 1 << 20
_OPENED_AT_ONCE = 8  # each asks the registry a few times
_MIB = 1 << 20


class Layers(Protocol):
    """What is needed of the layer store."""

    def path(self, layer_id: str) -> Path:
        """The file of a layer."""
        ...


class Blocks(Protocol):
    """What is needed of blockd."""

    async def add_remote(self, output: Path, blob: RemoteBlob, login: tuple[str, str] | None = None) -> int:
        """Make a layer file that is read from a registry as needed."""
        ...

    async def open(self, stack_id: str, lowers: Sequence[Path], upper: Upper | None, virtual_size_bytes: int | None, cache: str) -> Stack:
        """Open layers as one device."""
        ...

    async def close_stack(self, stack_id: str, force: bool = False) -> None:
        """Close it."""
        ...


@dataclass(frozen=True, slots=True)
class NativeDisk:
    """The layers of an image, bottom first, and the size of the disk they make."""

    layers: tuple[ImageLayer, ...]
    disk_mb: int


def planned(layers: Sequence[Descriptor]) -> list[str]:
    """The layers of an image in the store, made or not."""
    return [_layer_id(layer.digest) for layer in layers]


def is_native(layer_id: str) -> bool:
    """Whether a layer of the store is one of these."""
    return layer_id.startswith(_PREFIX)


def digest_prefix(layer_id: str) -> str:
    """How the checksum of a layer's file begins, as its name says; empty when that says nothing."""
    return layer_id.removeprefix(_PREFIX) if is_native(layer_id) else ""


def blob_of(path: Path) -> Descriptor | None:
    """Which blob a layer file stands for while the blob is still in a registry; None when the file is the layer itself. Blocks."""
    with path.open("rb") as file:
        text = file.read(_STUB_BYTES_MAX)
    if not text.startswith(_STUB):
        return None
    stub = json.loads(text.removeprefix(_STUB))
    return Descriptor("", str(stub["digest"]), int(stub["size_bytes"]))


def place_of(path: Path) -> str | None:
    """Where the blob of a layer file is read from; None when the file is the layer itself, or gone. Blocks."""
    try:
        with path.open("rb") as file:
            text = file.read(_STUB_BYTES_MAX)
    except FileNotFoundError:
        return None
    return str(json.loads(text.removeprefix(_STUB))["blobs_url"]) if text.startswith(_STUB) else None


class NativeImages:
    """Puts the layers of native images into the layer store. The caller has announced `planned`."""

    def __init__(self, layers: Layers, blocks: Blocks, config: ImagesConfig, helpers: HelperLogins) -> None:
        self._layers, self._blocks, self._config, self.helpers = layers, blocks, config, helpers
        self._turns = asyncio.Semaphore(_OPENED_AT_ONCE)

    async def adopt(self, layers: Sequence[Descriptor], place: ImageReference, login: Credentials | None, progress: Progress) -> NativeDisk:
        """Layers that stay in the registry; only what tells where their data lies is read now.

        PermissionDenied, NotFound, Unavailable, DataCorrupt.
        """
        repository = await asyncio.to_thread(repository_of, place, self._config)
        given = None if login is None else (login.username, login.password)
        if login is None:
            await asyncio.to_thread(self.helpers.refresh, (place.registry,))
        done = 0

        async def add(layer: Descriptor) -> None:
            nonlocal done
            async with self._turns:
                blob = RemoteBlob(f"{repository.url}/blobs", layer.digest, layer.size_bytes, repository.check_certificate)
                await self._blocks.add_remote(self._layers.path(_layer_id(layer.digest)), blob, given)
            done += 1
            progress("open the layers in the registry", done, len(layers))

        try:
            async with asyncio.TaskGroup() as group:
                for layer in {layer.digest: layer for layer in layers}.values():
                    group.create_task(add(layer))
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None  # the others were cancelled for it
        return await self._disk(layers)

    async def take(self, layers: Sequence[Descriptor], blobs: BlobFolder) -> NativeDisk:
        """Layers whose blobs are all on this machine. DataCorrupt, StorageFull."""
        for layer in layers:
            await asyncio.to_thread(self._copy, layer, blobs)
        return await self._disk(layers)

    def _copy(self, layer: Descriptor, blobs: BlobFolder) -> None:
        output = self._layers.path(_layer_id(layer.digest))
        with contextlib.suppress(FileNotFoundError):
            if output.stat().st_size == layer.size_bytes and blob_of(output) is None:
                return
        fresh = output.with_suffix(".new")
        digest = hashlib.sha256()
        with storage_full(f"layer {layer.digest}"), blobs.path(layer.digest).open("rb") as source, fresh.open("wb") as target:
            while piece := source.read(_PIECE_BYTES):
                digest.update(piece)
                target.write(piece)
        if f"sha256:{digest.hexdigest()}" != layer.digest:
            fresh.unlink()
            raise DataCorrupt(f"layer {layer.digest} was damaged on this machine", "pull or import the image again")
        shutil.move(fresh, output)

    async def _disk(self, layers: Sequence[Descriptor]) -> NativeDisk:
        """Open the layers as one disk, which checks them, and see how large it is."""
        made = tuple(ImageLayer(_layer_id(layer.digest), layer.digest, layer.size_bytes) for layer in layers)
        stack_id = f"look-{new_layer_id()}"
        stack = await self._blocks.open(stack_id, [self._layers.path(layer.layer_id) for layer in made], None, None, "page")
        await self._blocks.close_stack(stack_id, force=True)
        if stack.virtual_size_bytes % _MIB:
            raise InvalidInput(f"the image's disk of {stack.virtual_size_bytes} bytes has no whole MiB", "convert it with another size")
        return NativeDisk(made, stack.virtual_size_bytes // _MIB)


def _layer_id(digest: str) -> str:
    return f"{_PREFIX}{digest.partition(':')[2][:32]}"
