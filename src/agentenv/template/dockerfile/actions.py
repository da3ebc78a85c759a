"""What is done for the instructions of a stage, one after the other: all words replaced, all paths absolute.

Each says what it depends on beside the disk and the context it begins with (`content`), for the key of its cached disk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from agentenv.core.model import Context


@dataclass(frozen=True, slots=True)
class Origin:
    """The instruction an action is made of: its line, and its text for people."""

    line: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of RUN whose content is not part of the disk: empty at first, gone afterwards; `memory` is a tmpfs."""

    kind: Literal["cache", "memory"]
    target: str
    mode: int = 0o755
    owner: str = "0:0"


@dataclass(frozen=True, slots=True)
class Run:
    """A program with its arguments. `script` is a file that it needs, gone afterwards: path and content.

    `unkeyed` variables are in its environment as `variables` are, but a change of them does not make it run again.
    """

    origin: Origin
    argv: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    unkeyed: tuple[tuple[str, str], ...] = ()
    script: tuple[str, str] | None = None
    mounts: tuple[Mount, ...] = ()

    def content(self) -> list[object]:
        """What it depends on."""
        mounts = [[mount.kind, mount.target, mount.mode, mount.owner] for mount in self.mounts]
        return ["run", self.argv, self.variables, self.script, mounts]


@dataclass(frozen=True, slots=True)
class Copy:
    """Files that come in. Of `stage`, or of the archive `files_hash` of the context, or written in the Dockerfile (`inline`).

    `owner` empty leaves the owners as they are. `destination` ends with `/` when it can only be a folder. `unpacks`: sources that
    are archives are unpacked instead.
    """

    origin: Origin
    sources: tuple[str, ...]
    destination: str
    owner: str = ""
    mode: int | None = None
    stage: int | None = None
    files_hash: str = ""
    inline: tuple[tuple[str, str], ...] = ()
    excludes: tuple[str, ...] = ()
    unpacks: bool = False

    def content(self) -> list[object]:
        """What it depends on, but for the disk of `stage`."""
        how = [self.destination, self.owner, self.mode, self.excludes, self.unpacks, self.stage is None]
        return ["copy", self.sources, how, self.files_hash, self.inline]


@dataclass(frozen=True, slots=True)
class MakeFolder:
    """A folder that is made if it is missing, and the one of the actions after it."""

    origin: Origin
    path: str

    def content(self) -> list[object]:
        """What it depends on."""
        return ["folder", self.path]


@dataclass(frozen=True, slots=True)
class Become:
    """Another user, or more variables, for the actions after it; the disk stays as it is."""

    origin: Origin
    user: str = ""
    variables: tuple[tuple[str, str], ...] = ()

    def content(self) -> list[object]:
        """What it depends on."""
        return ["become", self.user, self.variables]

    def applied(self, context: Context) -> Context:
        """The context after it."""
        return replace(context, user=self.user or context.user, env_vars={**context.env_vars, **dict(self.variables)})


Action = Run | Copy | MakeFolder | Become
