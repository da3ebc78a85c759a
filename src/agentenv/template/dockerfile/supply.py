"""What the actions of a stage get from outside of its VM: files of other stages and from elsewhere, secrets, what caches hold."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentenv.template.dockerfile.actions import Remote


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was fetched for ADD, as an archive: one file of that name, or a tree (no name). `content` says exactly what it is."""

    archive: Path
    name: str
    content: str


class CacheFile(Protocol):
    """The content of a cache mount between builds."""

    @property
    def archive(self) -> Path | None:
        """What the last RUN has left in it; None when there is nothing."""
        ...

    async def keep(self, archive: Path) -> None:
        """Have this be its content from now on; the file goes there. Never fails: then the former content stays, or none."""
        ...


class Supply(Protocol):
    """Implemented by a build."""

    @property
    def secrets(self) -> Mapping[str, bytes]:
        """What the caller gives, by id."""
        ...

    async def pack(self, stage: int, sources: tuple[str, ...], output: Path, most_bytes: int, *, parents: bool = False) -> None:
        """Write what a stage has of some sources into an archive, of so many bytes at most."""
        ...

    def fetched(self, remote: Remote) -> Fetched:
        """What was fetched before the action began."""
        ...

    def cache(self, name: str, sharing: str) -> AbstractAsyncContextManager[CacheFile]:
        """A cache for the length of a RUN; one that is `locked` waits for others that use it."""
        ...
