"""The node's images: pulled or brought as a file, converted once, recorded, and given to builds as disks to start from.

Invariants: while one image is pulled everybody who asks for it waits for that pull; its layers are announced to the sweep from
before they are made until the record names them. Work under way reaches its end when callers leave: the next one finds it done.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv.core.builds import Registry as RegistryAccount
from agentenv.core.builds import Step, StepKind
from agentenv.core.errors import (
    AgentEnvError,
    Conflict,
    DataCorrupt,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    PermissionDenied,
    StorageFull,
    Unavailable,
)
from agentenv.core.ids import new_snapshot_id
from agentenv.core.images import IMAGE_USER, IMAGE_WORKDIR, Image, ImageConfig, ImageLayer, Platform
from agentenv.core.model import Context, Machine, Snapshot
from agentenv.host.command import Progress, no_progress
from agentenv.host.files import require_free
from agentenv.image import accounts, archives, native
from agentenv.image.credentials import Credentials, registry_name
from agentenv.image.native import NativeDisk
from agentenv.image.registry import LocalImage, ResolvedImage
from agentenv.orchestrator.collect import make_room
from agentenv.orchestrator.flights import Flights
from agentenv.orchestrator.image_book import ImageBook
from agentenv.orchestrator.parts import Parts
from agentenv.template.workshop import Base

_UNKNOWN = "0" * 64  # the checksum of what is known to be damaged alone
_FETCHES_AT_ONCE = 3  # each holds a thread, of which asyncio has as few as six


@dataclass(frozen=True, slots=True)
class _Made:
    """Layers in the store that make an image."""

    digest: str
    platform: Platform
    layers: tuple[ImageLayer, ...]
    config: ImageConfig
    disk_mb: int
    imported: bool


class Images(ImageBook):
    """Implements `template.workshop.BaseImages`: the record, and how images come into it."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._flights: Flights[Image] = Flights(parts.shared, "image", _FETCHES_AT_ONCE)

    async def pull(self, text: str, account: RegistryAccount | None = None, progress: Progress = no_progress) -> Image:
        """The image that a name means at its registry now, with all its layers made. It is asked for at every call.

        A registry that cannot be reached is no reason to refuse an image that is here. `progress` is called on the event loop.
        InvalidInput, PermissionDenied, NotFound, Unavailable, DataCorrupt, StorageFull, HostNotReady, DeadlineExceeded.
        """
        wanted = self.parse(text)
        name = str(wanted)
        key = (name, *sorted(account.settings.items())) if account else (name,)

        async def pull(report: Progress) -> Image:
            return await self._pull(name, await accounts.login(account, wanted.registry), report)

        return await self._flights.join(key, pull, progress)

    async def bring(self, source: Path, name: str, progress: Progress = no_progress) -> Image:
        """The image in a file or folder of this machine: an OCI layout, a `docker save` archive, a root file system in one archive.

        It is recorded as `name`. The file stays the caller's. InvalidInput, DataCorrupt, StorageFull.
        """
        wanted = self.parse(name)
        if wanted.digest:
            raise InvalidInput(f"image '{name}': an image that comes as a file is called NAME or NAME:TAG, without a digest")
        return await self._flights.join(("file", new_snapshot_id()), lambda report: self._bring(source, str(wanted), report), progress)

    async def receive(self, name: str, chunks: AsyncIterator[bytes], progress: Progress = no_progress) -> Image:
        """`bring` what arrives in pieces; a file is kept for that time alone. InvalidInput also when it is too large."""
        self.parse(name)
        limit_bytes = self._parts.config.images.layer_max_mb << 20
        folder = self._parts.paths.cache / "images"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".import-") as file:
            size_bytes = 0
            async for chunk in chunks:
                await self._require_free(len(chunk))
                size_bytes += len(chunk)
                if size_bytes > limit_bytes:
                    raise InvalidInput(f"an image may come as a file of {limit_bytes >> 20} MiB at most", "raise images.layer_max_mb")
                try:
                    await asyncio.to_thread(file.write, chunk)
                except OSError as error:
                    raise StorageFull(f"no room for the image: {error.strerror}", "free some space on the node") from error
            await asyncio.to_thread(file.flush)
            return await self.bring(Path(file.name), name, progress)

    async def base(self, reference: str, registry: RegistryAccount | None, on_progress: Callable[[str], object]) -> Base:
        """The root file system of an image, as a disk to start builds from."""
        told: set[str] = set()

        def tell(step: str, _done: int | None, _total: int | None) -> None:
            if step not in told:
                told.add(step)
                on_progress(step.removesuffix(" (bytes)"))

        name = str(self.parse(reference))
        image = self.named(name)
        if image is None or not image.imported or not self.is_current(image):
            image = await self.pull(reference, registry, tell)
        else:
            await self._parts.store.images.put(replace(image, used_at_ms=self._parts.clock.now_ms()))
        if self._parts.store.images.get(image.digest) is None:
            raise Conflict(f"image '{name}' was removed while the build began", "build again")
        return self._base(image, name)  # nobody waits from here on: the caller holds the snapshot before a sweep looks

    def account(self, reference: str, by_registry: Mapping[str, RegistryAccount]) -> RegistryAccount | None:
        """Which of some accounts, by registry, is for an image. InvalidInput when a name is none."""
        return {registry_name(name): account for name, account in by_registry.items()}.get(self.parse(reference).registry)

    async def empty(self) -> Base:
        """A disk with nothing on it: what all images are layers on."""
        parts, snapshot_id = self._parts, new_snapshot_id()
        layer_ids = tuple(parts.image_converter.planned(()))
        with parts.layers.announced(*layer_ids), parts.shared.using(snapshot_id):
            await parts.image_converter.make_base()
            parts.paths.snapshot(snapshot_id).mkdir(parents=True)
            await parts.store.add_snapshot(Snapshot(snapshot_id, self._machine, parts.identity, (), layer_ids, parts.clock.now_ms()))
            return Base(f"empty {layer_ids[-1]}", "scratch", snapshot_id, self._machine, Context("root", "/"))

    async def mend(self, layer_id: str) -> str:
        """Make a damaged layer anew, from the registry of an image that has it; returns that image. AgentEnvError when that cannot be."""
        failure: AgentEnvError = NotFound("no image from a registry has it", "restore the file from a copy, or delete what uses it")
        for image in self.all():
            if layer_id in image.layer_ids and not image.imported:
                try:
                    return await self._mend_from(image, layer_id)
                except AgentEnvError as error:
                    failure = error
        raise failure

    async def _mend_from(self, image: Image, layer_id: str) -> str:
        exact = str(self.parse(image.names[0]).at(image.digest))
        resolved = await asyncio.to_thread(self._parts.image_registry.resolve, exact, None)
        path = self._parts.layers.path(layer_id)
        aside = path.with_suffix(".aside")  # a part of the layer to the sweep
        async with self._parts.shared.locked(resolved.digest):
            await asyncio.to_thread(path.rename, aside)
            try:
                await asyncio.to_thread(self._parts.layers.forget, layer_id)
                await self._fetch(resolved, None, image.names[0], no_progress)
            except BaseException:
                await asyncio.to_thread(aside.rename, path)
                self._parts.layers.digests.put(layer_id, _UNKNOWN, is_damaged=True)
                raise
            await asyncio.to_thread(aside.unlink)
        return exact

    # --- the work

    async def _pull(self, name: str, credentials: Credentials | None, report: Progress) -> Image:
        try:
            resolved = await asyncio.to_thread(self._parts.image_registry.resolve, name, credentials)
        except (Unavailable, DeadlineExceeded) as error:
            known = self.named(name)
            if known is None or not self.is_current(known):
                raise
            report(f"use {known.digest}, which is on this node: {error.message}", None, None)
            return await self.record(known, name)
        async with self._parts.shared.locked(resolved.digest):
            known = self._parts.store.images.get(resolved.digest)
            if known is not None and self.is_current(known):
                if credentials is not None and resolved.manifest.native:
                    await self._adopt_layers(resolved, credentials, report)  # blockd forgets logins when it restarts
                return await self.record(replace(known, imported=False), name)
            return await self._fetch(resolved, credentials, name, report)

    async def _fetch(self, resolved: ResolvedImage, credentials: Credentials | None, name: str, report: Progress) -> Image:
        await self._require_free()
        if resolved.manifest.native and self._parts.config.images.lazy:
            try:
                return await self._adopt(resolved, credentials, name, report)
            except (Unavailable, PermissionDenied) as error:
                # blockd knows no credential helpers and fewer certificates than the program that pulls: that has the last word.
                report(f"download it whole, since it cannot be read as needed: {error.message}", None, None)
        try:
            return await self._pull_and_convert(resolved, credentials, name, report)
        except (DataCorrupt, InvalidInput):  # a damaged archive is hard to tell from one that never was one
            digests = [blob.digest for blob in (resolved.manifest.config, *resolved.manifest.layers)]
            if not await asyncio.to_thread(self._parts.image_registry.blobs.remove_damaged, digests):
                raise  # what the registry has is at fault, not our copy of it
        return await self._pull_and_convert(resolved, credentials, name, report)

    async def _pull_and_convert(self, resolved: ResolvedImage, credentials: Credentials | None, name: str, report: Progress) -> Image:
        local = await asyncio.to_thread(self._parts.image_registry.pull, resolved, credentials, report)
        return await self._convert(local, name, resolved.platform, report, imported=False)

    async def _bring(self, source: Path, name: str, report: Progress) -> Image:
        await self._require_free()
        platform = Platform()
        if source.is_dir():
            local = await asyncio.to_thread(archives.load_folder, source, name, platform)
            return await self._convert(local, name, platform, report, imported=True)
        folder = self._parts.paths.cache / "images"
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder, prefix=".import-"))
        try:
            report("read the archive", None, None)
            limit_bytes = self._parts.config.images.layer_max_mb << 20
            local = await asyncio.to_thread(archives.load_archive, source, work, name, platform, limit_bytes)
            return await self._convert(local, name, platform, report, imported=True)
        finally:
            await asyncio.to_thread(shutil.rmtree, work, True)

    async def _convert(self, local: LocalImage, name: str, platform: Platform, report: Progress, *, imported: bool) -> Image:
        if local.manifest.native:
            with self._parts.layers.announced(*native.planned(local.manifest.layers)):
                disk = await self._parts.native_images.take(local.manifest.layers, local.blobs)
                made = _Made(local.digest, platform, disk.layers, local.config, disk.disk_mb, imported)
                return await self._keep(made, name)
        local = await self._parts.image_converter.complete(local)
        with self._parts.layers.announced(*self._parts.image_converter.planned(local.config.diff_ids)):
            converted = await self._parts.image_converter.convert(local, report)
            made = _Made(local.digest, platform, converted.layers, converted.config, self._parts.config.guest.disk_mb, imported)
            return await self._keep(made, name)

    async def _adopt(self, resolved: ResolvedImage, credentials: Credentials | None, name: str, report: Progress) -> Image:
        """An image whose layers stay in the registry until they are needed."""
        config = await asyncio.to_thread(self._parts.image_registry.configuration, resolved, credentials)
        with self._parts.layers.announced(*native.planned(resolved.manifest.layers)):
            disk = await self._adopt_layers(resolved, credentials, report)
            return await self._keep(_Made(resolved.digest, resolved.platform, disk.layers, config, disk.disk_mb, False), name)

    async def _adopt_layers(self, resolved: ResolvedImage, credentials: Credentials | None, report: Progress) -> NativeDisk:
        place = resolved.found_at
        login = credentials if place.registry == resolved.reference.registry else None
        return await self._parts.native_images.adopt(resolved.manifest.layers, place, login, report)

    async def _keep(self, made: _Made, name: str) -> Image:
        """Record layers, which the caller has announced, as an image with a snapshot of their disk."""
        snapshot_id = new_snapshot_id()
        with self._parts.shared.using(snapshot_id):
            now_ms = self._parts.clock.now_ms()
            image = Image(made.digest, (name,), made.platform, made.layers, made.config, snapshot_id, now_ms, now_ms, made.imported)
            self._parts.paths.snapshot(snapshot_id).mkdir(parents=True)
            machine = replace(self._machine, disk_mb=made.disk_mb)
            await self._parts.store.add_snapshot(Snapshot(snapshot_id, machine, self._parts.identity, (), image.layer_ids, now_ms))
            return await self.record(image, name)

    # --- small things

    @property
    def _machine(self) -> Machine:
        guest = self._parts.config.guest
        return Machine(guest.vcpu_count, guest.memory_mb, guest.disk_mb)

    def _base(self, image: Image, name: str) -> Base:
        config = image.config
        snapshot = self._parts.store.snapshot(image.snapshot_id)
        wanted = Context(config.user or IMAGE_USER, config.working_dir or IMAGE_WORKDIR, config.env_vars)
        return Base(
            origin=f"image {image.digest} {image.layers[-1].layer_id}",
            label=f"{name}@{image.digest}",
            snapshot_id=image.snapshot_id,
            machine=self._machine if snapshot is None else replace(self._machine, disk_mb=snapshot.machine.disk_mb),
            context=replace(wanted, user="root", workdir="/"),
            preparation=(_literal("USER", wanted.user), _literal("WORKDIR", wanted.workdir)),
            image=config,
        )

    async def _require_free(self, more_bytes: int = 0) -> None:
        await make_room(self._parts)
        require_free(self._parts.paths.home, more_bytes + (self._parts.config.limits.disk_reserve_mb << 20), "an image")


def _literal(kind: StepKind, argument: str) -> Step:
    """A step whose argument holds no variables, whatever it looks like."""
    return Step(kind, (argument.replace("$", "\\$"),))
