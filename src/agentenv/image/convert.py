"""Layers of images become layers of disks: one for each, on an ext4 base that all images share.

    base        ext4-<key>       an empty file system, by mke2fs with a fixed identity, of the node's disk size
    layer n     image-<key>      key: base, version of the converter, and the chain id of the first n layers

Two images that begin with the same layers share those files. Beside `<id>.lsmt` is `<id>.json` with the figures; a layer counts as
made when both are there. Nothing depends on time, chance or host: the same layers give the same files anywhere.
The work is done by `imagefs`, a process of its own that reads one archive and writes one layer, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from weakref import WeakValueDictionary

from pydantic import TypeAdapter, ValidationError

from agentenv.config.schema import ImagesConfig
from agentenv.core.errors import AgentEnvError, DataCorrupt, Internal, InvalidInput, StorageFull
from agentenv.core.images import ImageConfig, ImageLayer
from agentenv.host.command import Progress, no_progress, run_command
from agentenv.host.files import require_free, storage_full
from agentenv.host.requirements import SYSTEM_PATH
from agentenv.image.registry import LocalImage

VERSION = 1
"""Of the conversion: another one gives other files for the same layers."""
_JOURNAL_MIB = 64
_FEATURES = (
    "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize"
)
_FILE_SYSTEM_ID = "6b1d3b4e-0b5c-4f0f-9a53-1f2a3b4c5d6e"
_HASH_SEED = "0a1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d"
_FAKE_TIME = "1"  # 0 means "now" to mke2fs
_BASE_DEADLINE_S = 300.0
_BY_CODE: dict[str, tuple[type[AgentEnvError], str]] = {
    "bad_layer": (InvalidInput, "the image itself is at fault: build it again"),
    "limit": (InvalidInput, "the node's operator sets images.layer_max_mb, images.layer_max_entries and images.layer_max_ratio"),
    "disk_too_small": (InvalidInput, "the node's operator sets guest.disk_mb"),
    "storage_full": (StorageFull, "free some space; nothing was lost"),
    "corrupt": (DataCorrupt, "pull the image again"),
}


class Layers(Protocol):
    """What the converter needs of the layer store."""

    def path(self, layer_id: str) -> Path:
        """The file of a layer."""
        ...

    def announced(self, *layer_ids: str) -> contextlib.AbstractContextManager[None]:
        """Keep the garbage sweep off these layers for the length of the body."""
        ...


@dataclass(frozen=True, slots=True)
class ConvertedImage:
    """An image as a disk: the stack of layers, bottom first, and what it says about running it."""

    name: str
    digest: str
    layers: tuple[ImageLayer, ...]
    config: ImageConfig

    @property
    def layer_ids(self) -> tuple[str, ...]:
        """The disk to open, bottom first."""
        return tuple(layer.layer_id for layer in self.layers)


_LAYER = TypeAdapter(ImageLayer)


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """The chain id of each layer: names it together with all below (OCI image-spec, `config`)."""
    chain: list[str] = []
    for diff_id in diff_ids:
        text = f"{chain[-1]} {diff_id}" if chain else diff_id
        chain.append(f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" if chain else diff_id)
    return chain


class Converter:
    """Converts images into the layer store. One layer is made once, however many ask for it at the same time."""

    def __init__(self, layers: Layers, imagefs: Path, config: ImagesConfig, disk_mb: int, reserve_bytes: int = 0) -> None:
        self._layers, self._imagefs, self._config, self._disk_mb = layers, imagefs, config, disk_mb
        self._reserve_bytes = reserve_bytes  # what must stay free on the node's disk
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(config.conversions_at_once)
        base = f"{VERSION} {disk_mb} {_JOURNAL_MIB} {_FEATURES} {_FILE_SYSTEM_ID} {_HASH_SEED}"
        self._base_key = hashlib.sha256(base.encode()).hexdigest()

    @property
    def base_id(self) -> str:
        """The layer with the empty file system."""
        return f"ext4-{self._base_key[:32]}"

    def layer_id(self, chain_id: str) -> str:
        """The layer that an image's layer with this chain id becomes."""
        return f"image-{hashlib.sha256(f'{self._base_key} {chain_id}'.encode()).hexdigest()[:32]}"

    def planned(self, diff_ids: Sequence[str]) -> list[str]:
        """The layers of an image, made or not: to announce while it is converted and until it is recorded."""
        return [self.base_id, *map(self.layer_id, chain_ids(diff_ids))]

    async def complete(self, image: LocalImage) -> LocalImage:
        """The image with the checksum of every layer: a bare root file system comes without. Call it before `planned`."""
        if all(image.config.diff_ids):
            return image
        limits = ["--max-bytes", str(self._config.layer_max_mb << 20), "--max-ratio", str(self._config.layer_max_ratio)]

        def checksum(digest: str) -> str:
            with image.blobs.path(digest).open("rb") as blob:
                return str(self._run(["checksum", *limits], blob, None, f"layer {digest}")["diff_id"])

        found = [await asyncio.to_thread(checksum, layer.digest) for layer in image.manifest.layers]
        return replace(image, config=replace(image.config, diff_ids=tuple(found)))

    async def convert(self, image: LocalImage, progress: Progress) -> ConvertedImage:
        """Make the layers that are missing. The caller has announced `planned` and records the result before that ends.

        InvalidInput (the image is at fault, or passes a limit), DataCorrupt, StorageFull. Layers made before a failure stay usable.
        """
        with image.blobs.using(layer.digest for layer in image.manifest.layers):
            made = [await self._once(self.base_id, lambda: self._make_base(progress))]
            diff_ids = image.config.diff_ids
            for number, (descriptor, chain_id) in enumerate(zip(image.manifest.layers, chain_ids(diff_ids), strict=True)):
                step = _Step(
                    self.layer_id(chain_id),
                    tuple(layer.layer_id for layer in made),
                    image.blobs.path(descriptor.digest),
                    descriptor.digest,
                    diff_ids[number],
                    chain_id,
                    f"convert layer {number + 1} of {len(diff_ids)} (bytes)",
                )
                made.append(await self._once(step.layer_id, partial(self._make_layer, step, progress)))
        return ConvertedImage(image.name, image.digest, tuple(made), image.config)

    async def make_base(self) -> None:
        """The layer that all images begin with, if it is missing. The caller has announced it."""
        await self._once(self.base_id, lambda: self._make_base(no_progress))

    async def _once(self, layer_id: str, make: Callable[[], ImageLayer]) -> ImageLayer:
        lock = self._busy.setdefault(layer_id, asyncio.Lock())
        async with lock, self._slots:
            found = await asyncio.to_thread(self._find, layer_id)
            if found is None:
                require_free(self._layers.path(layer_id).parent, self._reserve_bytes, "a layer of an image")
                found = await asyncio.to_thread(make)
            return found

    def _figures(self, layer_id: str) -> Path:
        return self._layers.path(layer_id).with_suffix(".json")

    def _find(self, layer_id: str) -> ImageLayer | None:
        try:
            found = _LAYER.validate_json(self._figures(layer_id).read_bytes())
            is_whole = self._layers.path(layer_id).stat().st_size == found.size_bytes
            return found if is_whole and found.layer_id == layer_id else None
        except (FileNotFoundError, ValidationError):
            return None  # made again, under the same name

    def _record(self, layer: ImageLayer) -> ImageLayer:
        path = self._figures(layer.layer_id)
        fresh = path.with_suffix(".new")  # the same id: the sweep takes it for a part of this layer
        with storage_full(f"the figures of layer {layer.layer_id}"):
            fresh.write_text(json.dumps(asdict(layer)))
            fresh.replace(path)
        return layer

    def _make_base(self, progress: Progress) -> ImageLayer:
        progress("make the base file system", None, None)
        output = self._layers.path(self.base_id)
        extended = f"hash_seed={_HASH_SEED},root_owner=0:0,assume_storage_prezeroed=1"
        with (
            storage_full("the base file system of images"),
            tempfile.NamedTemporaryFile(dir=output.parent, prefix=f"{self.base_id}.raw-") as image,
        ):
            image.truncate(self._disk_mb << 20)
            run_command(
                [
                    "mke2fs",
                    *("-q", "-F", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0", "-L", "root", "-O", _FEATURES),
                    *("-U", _FILE_SYSTEM_ID, "-J", f"size={_JOURNAL_MIB}", "-E", extended, image.name),
                ],
                timeout_s=_BASE_DEADLINE_S,
                env={
                    "E2FSPROGS_FAKE_TIME": _FAKE_TIME,
                    "MKE2FS_CONFIG": "/dev/null",  # the host's own wishes do not count
                    "PATH": f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}",
                },
                hint="apt-get install e2fsprogs (1.47 or newer)",
            )
            identity = _uuid_of(f"sha256:{self._base_key}")
            words = ["import", "--source", image.name, "--output", str(output), "--uuid", identity]
            answer = self._run(words, None, None, "the base file system")
        return self._record(ImageLayer(self.base_id, "", int(answer["size_bytes"])))

    def _make_layer(self, step: _Step, progress: Progress) -> ImageLayer:
        output = self._layers.path(step.layer_id)
        words = ["convert", "--output", str(output), "--uuid", _uuid_of(step.chain_id), "--diff-id", step.diff_id]
        for lower in step.lowers:
            words += ["--lower", str(self._layers.path(lower))]
        words += ["--max-bytes", str(self._config.layer_max_mb << 20), "--max-entries", str(self._config.layer_max_entries)]
        words += ["--max-ratio", str(self._config.layer_max_ratio)]
        with step.blob.open("rb") as blob:
            total = os.fstat(blob.fileno()).st_size

            def watch() -> None:
                progress(step.name, os.lseek(blob.fileno(), 0, os.SEEK_CUR), total)  # the child reads by the same position

            answer = self._run(words, blob, watch, f"layer {step.digest}")
        if answer["input_digest"] != step.digest:
            output.unlink()
            raise DataCorrupt(f"layer {step.digest} was damaged on this machine: it has {answer['input_digest']}", "pull it again")
        progress(step.name, total, total)
        return self._record(ImageLayer(step.layer_id, step.diff_id, int(answer["size_bytes"])))

    def _run(self, words: list[str], stdin: BinaryIO | None, watch: Callable[[], None] | None, what: str) -> dict[str, Any]:
        raw = run_command([self._imagefs, *words], timeout_s=self._config.convert_deadline_s, stdin=stdin, watch=watch)
        answer: dict[str, Any] = json.loads(raw)
        if failure := answer.get("error"):
            cls, hint = _BY_CODE.get(failure["code"], (Internal, ""))
            raise cls(f"{what}: {failure['message']}", hint)
        return answer


@dataclass(frozen=True, slots=True)
class _Step:
    """One layer to make."""

    layer_id: str
    lowers: tuple[str, ...]
    blob: Path
    digest: str
    diff_id: str
    chain_id: str
    name: str


def _uuid_of(digest: str) -> str:
    """The first 32 digits of a digest as overlaybd's identity of a layer."""
    return str(uuid.UUID(digest.partition(":")[2][:32])).upper()
