"""Images from registries, by `skopeo`: which one a name means, and its blobs into the cache.

Invariants: what a pull brings is the image that was resolved, by digest, whatever the tag names meanwhile; mirrors come first
and a mirror that fails is passed over; no policy, alias or mirror list of the host has a say.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.config.schema import ImagesConfig
from agentenv.core.errors import (
    AgentEnvError,
    DataCorrupt,
    DeadlineExceeded,
    HostNotReady,
    Internal,
    InvalidInput,
    NotFound,
    PermissionDenied,
    StorageFull,
    Unavailable,
    Unsupported,
)
from agentenv.core.images import ImageConfig, Platform
from agentenv.host.command import Progress, run_command
from agentenv.host.files import require_free, storage_full
from agentenv.host.requirements import find_program
from agentenv.image import manifest as manifests
from agentenv.image import reference as references
from agentenv.image.blobs import BlobFolder
from agentenv.image.credentials import Credentials, auth_file
from agentenv.image.manifest import Manifest
from agentenv.image.reference import ImageReference
from agentenv.image.repository import known_login, repository_of

_ASK_DEADLINE_S = 60.0
_TRIES = 3
_INSTALL = "apt-get install skopeo"

#: What skopeo's registry client says, and what it means. The program has one exit status for all of them.
_LOGGED = re.compile(r'level=\w+ msg=(?P<said>"(?:[^"\\]|\\.)*")')
_MEANINGS: tuple[tuple[tuple[str, ...], type[AgentEnvError], str], ...] = (
    (("no space left on device",), StorageFull, "free some space; nothing was lost"),
    (
        ("unauthorized", "authentication required", "invalid username/password", "denied"),
        PermissionDenied,
        "give credentials for this registry, or `docker login` as the node's user",
    ),
    (("manifest unknown", "name unknown", "not found", "repository name not known"), NotFound, "see that name and tag are right"),
    (("http response to https client",), Unavailable, "add the registry to images.insecure_registries if it has no TLS"),
    (("x509:", "certificate"), Unavailable, "put its CA into a folder of images.certs_dir, named as the registry"),
    (
        ("too many requests", "toomanyrequests"),
        Unavailable,
        "the registry limits its callers: wait, give credentials, or set images.mirrors",
    ),
    (("connection refused", "no such host", "i/o timeout", "connection reset", "eof"), Unavailable, "see that the registry can be reached"),
)


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """Which image a name means now. `found_at` is where it was found: the registry itself or a mirror."""

    reference: ImageReference
    found_at: ImageReference
    digest: str
    """Of the manifest for one platform."""
    manifest: Manifest
    platform: Platform


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image whose blobs are all on this machine."""

    name: str
    digest: str
    manifest: Manifest
    config: ImageConfig
    blobs: BlobFolder


class Registry:
    """Pulls images into `<cache>/images`. All methods block."""

    def __init__(self, cache: Path, config: ImagesConfig, reserve_bytes: int = 0) -> None:
        self._folder = cache / "images"
        self._config = config
        self._reserve_bytes = reserve_bytes  # what must stay free on the node's disk
        self.blobs = BlobFolder(self._folder / "blobs")

    def open(self) -> None:
        """Remove what the work of a server that was killed has left: half-loaded blobs, unpacked archives, files with credentials."""
        for leftover in self._folder.glob(".*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)

    def parse(self, text: str) -> ImageReference:
        """The image that a name means, if the node may use it. InvalidInput, PermissionDenied."""
        reference = references.parse(text, self._config.default_registry)
        references.check_allowed(reference, self._config.allow, self._config.deny)
        return reference

    def push(self, layout: Path, target: ImageReference, credentials: Credentials | None) -> None:
        """Send the image of an OCI layout, whose blobs are in `blobs`, as it is; blobs that the registry has are not sent.

        A blob that is missing here must be there. PermissionDenied, Unavailable, NotFound, HostNotReady, DeadlineExceeded.
        """
        words = ("--preserve-digests", "--src-shared-blob-dir", str(self.blobs.folder), f"oci:{layout}:image", f"docker://{target.exact}")
        self._ask(target, target, credentials, "copy", "--quiet", *words, side="dest-")

    def resolve(self, text: str, credentials: Credentials | None = None, platform: Platform = Platform()) -> ResolvedImage:  # noqa: B008
        """The manifest that a name means. InvalidInput, PermissionDenied, NotFound, Unavailable, HostNotReady."""
        reference = self.parse(text)
        found = self._at_first_place(reference, lambda place: self._resolve_at(reference, place, credentials, platform))
        return self._twin(found, credentials)

    def pull(self, image: ResolvedImage, credentials: Credentials | None, progress: Progress) -> LocalImage:
        """Bring what the cache lacks. The blobs are those of the manifest, each with the digest it names."""
        what = str(image.reference)
        wanted = (image.manifest.config, *image.manifest.layers)
        if not all(self.blobs.is_complete(blob.digest, blob.size_bytes) for blob in wanted):
            self._copy(image, credentials, progress)
        for blob in wanted:
            if not self.blobs.is_complete(blob.digest, blob.size_bytes):
                raise DataCorrupt(f"{what}: the registry sent another blob than {blob.digest}", "pull again, or from another place")
        raw = self.blobs.read(image.manifest.config.digest, manifests.CONFIG_BYTES_MAX)
        config = manifests.parse_config(raw, image.manifest, image.platform, what)
        return LocalImage(what, image.digest, image.manifest, config, self.blobs)

    def configuration(self, image: ResolvedImage, credentials: Credentials | None) -> ImageConfig:
        """What an image says about running it; its layers stay where they are."""
        what = str(image.reference)
        raw = self._ask(image.found_at, image.reference, credentials, "inspect", "--config", "--raw", f"docker://{image.found_at.exact}")
        if manifests.digest_of(raw) != image.manifest.config.digest:
            raise DataCorrupt(f"{what}: the registry sent another configuration than {image.manifest.config.digest}", "pull again")
        return manifests.parse_config(raw, image.manifest, image.platform, what)

    def _twin(self, image: ResolvedImage, credentials: Credentials | None) -> ResolvedImage:
        """The overlaybd-native image that refers to this one, by the registry's list or else by OCI's tag scheme; or the image itself."""
        place = image.found_at
        if image.manifest.native or place.registry not in self._config.twins:
            return image
        what = f"{image.reference} (its referrers)"
        try:
            raw = self._referrers(image, credentials)
            if raw is None:
                tag = place.at_tag(image.digest.replace(":", "-"))
                raw = self._ask(tag, image.reference, credentials, "inspect", "--raw", f"docker://{tag.exact}")
            for digest in manifests.referrers(manifests.load(raw, what), what):
                return self._resolve_at(image.reference, place.at(digest), credentials, image.platform)
        except (NotFound, Unsupported, InvalidInput):
            pass  # there is none, or none for this platform
        return image

    def _referrers(self, image: ResolvedImage, credentials: Credentials | None) -> bytes | None:
        place = image.found_at
        given = credentials if place.registry == image.reference.registry else None
        repository = repository_of(place, self._config)
        return repository.referrers(image.digest, manifests.NATIVE_ARTIFACT, given or known_login(place, self._config))

    def _at_first_place(self, reference: ImageReference, ask: Callable[[ImageReference], ResolvedImage]) -> ResolvedImage:
        *mirrors, origin = references.pull_names(reference, self._config.mirrors)
        failed: list[str] = []
        for place in mirrors:
            try:
                return ask(place)
            except HostNotReady:
                raise
            except AgentEnvError as error:  # a mirror may be down, or not have it: the registry itself has the last word
                failed.append(f"mirror {place.registry}: {error.message}")
        try:
            return ask(origin)
        except AgentEnvError as error:
            if not failed:
                raise
            raise type(error)(f"{error.message}; before it, {'; '.join(failed)}", error.hint) from error

    def _resolve_at(
        self, reference: ImageReference, place: ImageReference, credentials: Credentials | None, platform: Platform
    ) -> ResolvedImage:
        what = str(reference)
        for _ in range(manifests.INDEX_DEPTH_MAX):
            raw = self._ask(place, reference, credentials, "inspect", "--raw", f"docker://{place.exact}")
            digest = manifests.digest_of(raw)
            if place.digest is not None and digest != place.digest:
                raise DataCorrupt(f"{what}: the registry sent a manifest with the digest {digest}, not {place.digest}")
            document = manifests.load(raw, what)
            if not manifests.is_index(document):
                parsed = manifests.parse_manifest(document, what)
                return ResolvedImage(reference, place.at(digest), digest, parsed, platform)
            place = place.at(manifests.choose(document, platform, what))
        raise DataCorrupt(f"{what}: its indexes name only further indexes")

    def _copy(self, image: ResolvedImage, credentials: Credentials | None, progress: Progress) -> None:
        total = sum(layer.size_bytes for layer in image.manifest.layers)
        before = self.blobs.used_bytes()
        there = sum(b.size_bytes for b in image.manifest.layers if self.blobs.is_complete(b.digest, b.size_bytes))
        self.blobs.folder.mkdir(parents=True, exist_ok=True)
        require_free(self.blobs.folder, total - there + self._reserve_bytes, f"image {image.reference}")
        step = f"pull {image.reference} (bytes)"
        blobs = (image.manifest.config, *image.manifest.layers)

        def missing() -> int:
            return sum(not self.blobs.is_complete(blob.digest, blob.size_bytes) for blob in blobs)

        def watch() -> None:
            progress(step, min(total, there + self.blobs.used_bytes() - before), total)

        source = f"docker://{image.found_at.exact}"
        with self._layout() as layout:
            # skopeo waits as long as a registry that limits its callers asks it to, a few times.
            options = ("--dest-oci-accept-uncompressed-layers", "--dest-shared-blob-dir", str(self.blobs.folder))
            target = (*options, source, f"oci:{layout}:image")
            while wanted := missing():
                try:
                    self._ask(image.found_at, image.reference, credentials, "copy", "--quiet", *target, watch=watch)
                    break
                except (PermissionDenied, Unavailable):
                    # A token that ended, or a connection: what has come stays, and each further try brings more or is the last.
                    if missing() == wanted:
                        raise
        progress(step, total, total)
        self.blobs.prune(self._config.cache_mb << 20)

    @contextmanager
    def _layout(self) -> Iterator[Path]:
        """A folder for skopeo's own notes; the blobs go to the cache."""
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self._folder, prefix=".pull-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _ask(
        self,
        place: ImageReference,
        reference: ImageReference,
        credentials: Credentials | None,
        verb: str,
        *words: str,
        watch: Callable[[], None] | None = None,
        side: str = "src-",
    ) -> bytes:
        program = find_program("skopeo")
        if program is None:
            raise HostNotReady("images come through skopeo, and this machine has none", _INSTALL)
        self.blobs.folder.mkdir(parents=True, exist_ok=True)
        side = side if verb == "copy" else ""  # which of the two the registry is
        options = ["--retry-times", str(_TRIES)] if verb == "copy" else []
        if place.registry in self._config.insecure_registries:
            options.append(f"--{side}tls-verify=false")
        certificates = self._config.certs_dir / place.registry
        if certificates.is_dir():
            options += [f"--{side}cert-dir", str(certificates)]
        given = credentials if place.registry == reference.registry else None
        with (
            storage_full(f"image {reference}"),
            auth_file(place.registry, given, self._config.docker_config_file, self._folder) as authentication,
        ):
            try:
                return run_command(
                    [program, "--insecure-policy", verb, "--authfile", authentication, *options, *words],
                    timeout_s=self._config.pull_deadline_s if verb == "copy" else _ASK_DEADLINE_S,
                    env={"CONTAINERS_REGISTRIES_CONF": "/dev/null"},
                    watch=watch,
                    max_output_bytes=manifests.MANIFEST_BYTES_MAX,
                )
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"image '{place}': {error.message}", f"see whether {place.registry} limits its callers") from error
            except Internal as error:
                raise _meaning(error, place) from error


def _meaning(error: Internal, place: ImageReference) -> AgentEnvError:
    said = error.message.lower()
    for texts, cls, hint in _MEANINGS:
        if any(text in said for text in texts):
            return cls(f"image '{place}': {_last_line(error.message)}", hint)
    return Unavailable(f"image '{place}': {_last_line(error.message)}", "try again, or see what the registry says")


def _last_line(message: str) -> str:
    """What skopeo said last, out of its log's form (`time=... level=fatal msg="..."`)."""
    line = message.strip().splitlines()[-1]
    if found := _LOGGED.search(line):
        with contextlib.suppress(ValueError):
            line = json.loads(found["said"])
    return line[-600:]
