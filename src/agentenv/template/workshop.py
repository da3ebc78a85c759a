"""What a build asks of the node: machines to run steps in, and root file systems to start from. The node's side implements it.

A bench is one running VM of one build. Whoever opened it closes it; what it has kept is safe from the sweep until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentenv.core.builds import Registry, Step
from agentenv.core.images import ImageConfig
from agentenv.core.model import Context, Machine, Snapshot
from agentenv.guest.commands import Command, Ended, OnOutput, OnStart
from agentenv.guest.provision import Place

CLOCK_BEHIND_MS = 2 * 3_600_000
"""What runs in a template believes to be earlier: OpenSSL takes new entropy once its generator is an hour old by the clock, so each
sandbox's processes do so at their first use, instead of drawing what those of all other sandboxes draw."""

SETTLE = "sync ; echo 1 > /proc/sys/vm/compact_memory ; sync"
"""The last command before the capture: nothing is half-written, and the free memory is in one piece."""


@dataclass(frozen=True, slots=True)
class Base:
    """What a build starts from. `origin` names its exact content; `label` is for people."""

    origin: str
    label: str
    snapshot_id: str
    machine: Machine
    context: Context
    preparation: tuple[Step, ...] = ()
    """What is done to the disk before anything else: not the caller's steps, and not counted as such."""
    image: ImageConfig | None = None
    """What the image says about running it, as it stands there; None when it is none."""


class Bench(Protocol):
    """A running VM of a build."""

    @property
    def envd_version(self) -> str:
        """What its agent says it is."""
        ...

    async def run(self, command: Command, on_output: OnOutput, deadline_s: float, on_start: OnStart = lambda: None) -> Ended:
        """Run a command to its end; from `on_start` on it runs, and goes on when the call is cancelled.

        CommandRefused, DeadlineExceeded, Internal (the VM was lost).
        """
        ...

    async def look(self, owner: str, path: str) -> Place:
        """The numbers of `user` or `user:group` in the guest, and what `path` is there. InvalidInput when it has no such owner."""
        ...

    async def make_user(self, name: str) -> None:
        """Make a user, unless there is one of that name. InvalidInput."""
        ...

    async def make_folder(self, path: str, uid: int, gid: int) -> None:
        """Make a folder, and those above it that are missing, for that owner. InvalidInput, StorageFull."""
        ...

    async def unpack(self, archive: Path, folder: str, uid: int, gid: int, deadline_s: float, *, is_apart: bool = False) -> None:
        """Unpack an archive of the host below a folder of the guest, made if it is missing. InvalidInput, StorageFull.

        `is_apart`: what is on the disk gives way, and no link of it is followed.
        """
        ...

    async def mount(self, source: str, target: str, *, is_read_only: bool = False, size_bytes: int = 0, mode: int = 0o755) -> str:
        """Mount a file or folder of the guest, or an empty folder in its memory (no source); returns what was made for it. InvalidInput."""
        ...

    async def unmount(self, target: str, made: str, folder: str) -> None:
        """Take a mount away, what was made for it, and the folder of its content. Idempotent."""
        ...

    async def pack(
        self,
        sources: tuple[str, ...],
        output: Path,
        most_bytes: int,
        deadline_s: float,
        *,
        root: str = "/",
        parents: bool = False,
    ) -> None:
        """Write what the guest's disk has of some sources below `root` into an archive, as `dockerfile.patterns` reads sources.

        What is missing is left out. A source that is a link is followed. With `parents` the folders above each are in it.
        InvalidInput when it is more than `most_bytes`.
        """
        ...

    async def keep(self) -> str:
        """Seal the disk as it is, all files written out; the VM runs on. Returns the id of a snapshot of the disk alone."""
        ...

    async def capture(self) -> Snapshot:
        """Keep this instant with its memory; the VM runs on."""
        ...

    async def close(self) -> None:
        """End the VM and let go of what it kept. Safe to call twice, and when the VM is gone."""
        ...


class Workshop(Protocol):
    """The node as builds see it."""

    def base(self, reference: str) -> Base:
        """What a template's build starts from. NotFound, InvalidInput."""
        ...

    def using(self, snapshot_id: str) -> AbstractContextManager[None]:
        """Keep the sweep off a snapshot for the length of the body."""
        ...

    def has(self, snapshot_id: str) -> bool:
        """Whether a snapshot still exists."""
        ...

    def has_memory(self, snapshot_id: str) -> bool:
        """Whether a VM can go on from it, instead of booting."""
        ...

    async def open(
        self, title: str, snapshot_id: str, machine: Machine, context: Context, *, cold: bool, life_s: float, clock_behind_ms: int = 0
    ) -> Bench:
        """Start a VM that lives for `life_s` at most. `cold` boots its disk on a machine of any size. LimitReached, Internal.

        `clock_behind_ms` sets its clock that much before ours.
        """
        ...

    def release(self) -> None:
        """Something is needed no longer: free its bytes soon."""
        ...


class BaseImages(Protocol):
    """Root file systems made of OCI images."""

    async def base(self, reference: str, registry: Registry | None, on_progress: Callable[[str], object]) -> Base:
        """The root file system of an image as a snapshot of a disk alone, with the image's user, folder and environment.

        `on_progress` is told in words what goes on. NotFound, InvalidInput, PermissionDenied, Unavailable.
        """
        ...

    def account(self, reference: str, accounts: Mapping[str, Registry]) -> Registry | None:
        """Which of some accounts, by registry, is for an image."""
        ...

    async def empty(self) -> Base:
        """A root file system with nothing in it. The caller holds its snapshot before it waits for anything."""
        ...
