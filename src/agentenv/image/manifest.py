"""What registries say of an image: indexes, manifests, configurations. All of it comes from outside and is checked here.

Wire facts: OCI image-spec 1.1 (`image-index`, `manifest`, `config`) and Docker's schema 2, which has the same shape.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.core.errors import DataCorrupt, InvalidInput, Unsupported
from agentenv.core.images import ImageConfig, Platform
from agentenv.image.reference import DIGEST

MANIFEST_BYTES_MAX = 4 << 20  # what registries accept
CONFIG_BYTES_MAX = 8 << 20
VARIABLE_BYTES_MAX = 128 << 10  # the kernel's limit for one string of an environment
VARIABLES_CHARS_MAX = 1 << 20  # half of what a program can be given, so that its arguments fit, too
INDEX_DEPTH_MAX = 3  # an index may name another one
LAYERS_MAX = 200  # a stack holds 255; steps of a build come on top
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_LAYER = re.compile(
    r"application/vnd\.(?:oci\.image\.layer(?:\.nondistributable)?\.v1\.tar(?:\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.(?:diff|foreign\.diff)\.tar(?:\.gzip|\.zstd)?)"
)
_ATTESTATION = "vnd.docker.reference.type"
OVERLAYBD = "containerd.io/snapshot/overlaybd/"
"""Prefix of the annotations of overlaybd's layers (contract of its image format, section 5.1)."""
NATIVE_ARTIFACT = "application/vnd.containerd.overlaybd.native.v1+json"
"""Type of an overlaybd-native twin that refers to an ordinary image."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob by its digest."""

    media_type: str
    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image for one platform: its configuration and its layers, bottom first."""

    config: Descriptor
    layers: tuple[Descriptor, ...]
    native: bool = False
    """Whether the layers are layers of a disk (overlaybd), and no archives."""


def is_index(document: dict[str, Any]) -> bool:
    """Whether a document lists manifests for several platforms."""
    return document.get("mediaType") in _INDEXES or ("manifests" in document and "layers" not in document)


def load(raw: bytes, what: str, limit_bytes: int = MANIFEST_BYTES_MAX) -> dict[str, Any]:
    """A JSON object. DataCorrupt when it is none, or too long."""
    if len(raw) > limit_bytes:
        raise DataCorrupt(f"{what} has {len(raw)} bytes, more than the {limit_bytes} that are accepted")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataCorrupt(f"{what} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataCorrupt(f"{what} is no JSON object")
    return document


def choose(index: dict[str, Any], platform: Platform, what: str) -> str:
    """The digest of the manifest for `platform`. InvalidInput names the platforms there are.

    Attestations are manifests, too, for no platform at all; they are passed over.
    """
    found: list[tuple[str, str]] = []
    offered: set[str] = set()
    for entry in _list(index.get("manifests"), what):
        if _ATTESTATION in (entry.get("annotations") or {}):
            continue
        made_for = entry.get("platform") or {}
        name = f"{made_for.get('os')}/{made_for.get('architecture')}"
        if name == str(platform):
            found.append((str(made_for.get("variant") or ""), _digest(entry, what)))
        elif "unknown" not in name:
            offered.add(name)
    if not found:
        choices = ", ".join(sorted(offered)[:20]) or "no platform"
        raise InvalidInput(f"{what} is not made for {platform}", f"it is made for {choices}")
    return min(found)[1]  # the one without a variant runs everywhere


def referrers(index: dict[str, Any], what: str) -> list[str]:
    """The digests of the overlaybd-native images in a list of referrers."""
    return [_digest(entry, what) for entry in _list(index.get("manifests"), what) if entry.get("artifactType") == NATIVE_ARTIFACT]


def parse_manifest(document: dict[str, Any], what: str) -> Manifest:
    """Config and layers of a manifest. InvalidInput or Unsupported when it is no image this node can use."""
    if document.get("schemaVersion") != 2 or "config" not in document:
        raise InvalidInput(f"{what} has a manifest of an old or unknown kind ({document.get('mediaType', 'schema 1')})", "push it again")
    config = _descriptor(document["config"], f"{what}: config")
    if config.media_type not in _CONFIGS:
        raise InvalidInput(f"{what} is no image of a file system, but {config.media_type or 'something else'}")
    entries = _list(document.get("layers"), what)
    if len(entries) > LAYERS_MAX:
        raise InvalidInput(f"{what} has {len(entries)} layers, more than {LAYERS_MAX}", "squash it")
    layers = [_descriptor(entry, f"{what}: layer") for entry in entries]
    native = [_is_native(entry, what) for entry in entries]
    if any(native):
        return _native_manifest(config, entries, layers, native, what)
    for layer in layers:
        if not _LAYER.fullmatch(layer.media_type):
            raise Unsupported(f"{what} has a layer of type {layer.media_type} that is no plain archive")
    return Manifest(config, tuple(layers))


def _notes(entry: dict[str, Any]) -> dict[str, str]:
    """The overlaybd annotations of a layer, without their prefix."""
    annotations = entry.get("annotations") or {}
    if not isinstance(annotations, dict):
        return {}
    return {str(key).removeprefix(OVERLAYBD): str(value) for key, value in annotations.items() if str(key).startswith(OVERLAYBD)}


def _is_native(entry: dict[str, Any], what: str) -> bool:
    notes = _notes(entry)
    if any(name.startswith("turbo-oci/") for name in notes) or notes.get("blob-digest", entry.get("digest")) != entry.get("digest"):
        raise Unsupported(f"{what} is a TurboOCI image, which refers to another one", "convert it to overlaybd's native form")
    is_typed = any(token in str(entry.get("mediaType")) for token in (".overlaybd", ".zfile", ".lsmt"))
    return "blob-digest" in notes or is_typed


def _native_manifest(
    config: Descriptor, entries: Sequence[dict[str, Any]], layers: list[Descriptor], native: list[bool], what: str
) -> Manifest:
    if not all(native):
        raise Unsupported(f"{what} mixes overlaybd layers with archives", "convert all of its layers")
    kinds = {_notes(entry).get("blob-fs-type") or "ext4" for entry in entries}
    if kinds != {"ext4"}:
        raise Unsupported(
            f"{what} has a file system of type {', '.join(sorted(kinds - {'ext4'}))}; guests boot from ext4", "convert it with ext4"
        )
    if _notes(entries[-1]).get("acceleration-layer") == "yes":
        layers = layers[:-1]  # a trace of reads and no data
    if not layers:
        raise DataCorrupt(f"{what} has no layer with data")
    return Manifest(config, tuple(layers), native=True)


def parse_config(raw: bytes, manifest: Manifest, platform: Platform, what: str) -> ImageConfig:
    """The configuration. InvalidInput when it is for another platform, DataCorrupt when it does not fit the manifest."""
    document = load(raw, f"{what}: config", CONFIG_BYTES_MAX)
    made_for = f"{document.get('os') or platform.os}/{document.get('architecture') or platform.architecture}"
    if made_for != str(platform):
        raise InvalidInput(f"{what} is made for {made_for}, not for {platform}")
    rootfs = document.get("rootfs")
    diff_ids = _texts(rootfs.get("diff_ids"), what) if isinstance(rootfs, dict) else None
    if diff_ids is not None and manifest.native:
        diff_ids = diff_ids[: len(manifest.layers)]  # one more may be that of a trace
    if diff_ids is None or len(diff_ids) != len(manifest.layers) or not all(map(DIGEST.fullmatch, diff_ids)):
        raise DataCorrupt(f"{what}: its configuration names other layers than its manifest")
    run = document.get("config") or {}
    if not isinstance(run, dict):
        raise DataCorrupt(f"{what}: its configuration is malformed")
    labels = run.get("Labels") or {}
    return ImageConfig(
        env=_variables(run.get("Env"), what),
        entrypoint=_texts(run.get("Entrypoint"), what),
        cmd=_texts(run.get("Cmd"), what),
        user=str(run.get("User") or ""),
        working_dir=str(run.get("WorkingDir") or ""),
        exposed_ports=tuple(sorted(map(str, run.get("ExposedPorts") or {}))),
        labels={str(key): str(value) for key, value in labels.items()} if isinstance(labels, dict) else {},
        stop_signal=str(run.get("StopSignal") or ""),
        shell=_texts(run.get("Shell"), what),
        volumes=tuple(sorted(map(str, run.get("Volumes") or {}))),
        on_build=_texts(run.get("OnBuild"), what) or (),
        diff_ids=diff_ids,
    )


def _descriptor(value: Any, what: str) -> Descriptor:
    if not isinstance(value, dict) or not isinstance(value.get("size"), int) or value["size"] < 0:
        raise DataCorrupt(f"{what}: its descriptor is malformed")
    return Descriptor(str(value.get("mediaType", "")), _digest(value, what), value["size"])


def _digest(value: dict[str, Any], what: str) -> str:
    digest = value.get("digest")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise DataCorrupt(f"{what}: '{digest}' is no sha256 digest")
    return digest


def _list(value: Any, what: str) -> Sequence[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise DataCorrupt(f"{what}: its manifest is malformed")
    return value


def _variables(value: Any, what: str) -> tuple[str, ...]:
    """Variables that every program in the image can be given. InvalidInput."""
    entries = _texts(value, what) or ()
    for entry in entries:
        if "\0" in entry or len(entry.encode(errors="surrogatepass")) > VARIABLE_BYTES_MAX:
            raise InvalidInput(f"{what}: the variable {entry[:80]!r} holds a NUL, or has more than {VARIABLE_BYTES_MAX} bytes")
    if sum(map(len, entries)) > VARIABLES_CHARS_MAX:
        raise InvalidInput(f"{what}: its variables have more than {VARIABLES_CHARS_MAX} characters together")
    return entries


def _texts(value: Any, what: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise DataCorrupt(f"{what}: its configuration is malformed")
    return tuple(value)


def digest_of(raw: bytes) -> str:
    """The digest of a document as it came."""
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def digest_of_file(path: Path) -> str:
    """The digest of a file of any size. Blocks."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
