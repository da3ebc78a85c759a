"""The nouns of OCI images: what one says about running it, and what a node has recorded of those it has as layers. No I/O.

Invariants: a record is known by the digest of its manifest and has at least one name; a name belongs to one record.
"""

from __future__ import annotations

from dataclasses import dataclass, field

IMAGE_USER, IMAGE_WORKDIR = "user", "/home/user"
"""What commands start with where an image names no USER or WORKDIR, as in the E2B service (contract section 2.5)."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What a program is made for."""

    os: str = "linux"
    architecture: str = "amd64"

    def __str__(self) -> str:
        return f"{self.os}/{self.architecture}"


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says about running it. Lists are None where the image says nothing."""

    env: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    user: str = ""
    working_dir: str = ""
    exposed_ports: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    stop_signal: str = ""
    shell: tuple[str, ...] | None = None
    volumes: tuple[str, ...] = ()
    on_build: tuple[str, ...] = ()  # instructions for Dockerfiles that start from it
    diff_ids: tuple[str, ...] = ()
    """Checksums of the decompressed layers, bottom first."""

    @property
    def env_vars(self) -> dict[str, str]:
        """`env` as names and values; what is no `NAME=value` is left out, as runtimes do."""
        pairs = (entry.partition("=") for entry in self.env)
        return {name: value for name, equals, value in pairs if name and equals}


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """One layer in the store. `diff_id` is empty for the base. `size_bytes` is that of its file."""

    layer_id: str
    diff_id: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the node has as layers of a disk, and the snapshot of that disk alone that builds start from."""

    digest: str
    names: tuple[str, ...]
    platform: Platform
    layers: tuple[ImageLayer, ...]
    config: ImageConfig
    snapshot_id: str
    created_at_ms: int
    used_at_ms: int
    imported: bool = False  # from a file: its names are looked up here, not at a registry

    @property
    def layer_ids(self) -> tuple[str, ...]:
        """The disk, bottom first."""
        return tuple(layer.layer_id for layer in self.layers)

    @property
    def size_bytes(self) -> int:
        """What its layers take, those that it shares with others included."""
        return sum(layer.size_bytes for layer in self.layers)
