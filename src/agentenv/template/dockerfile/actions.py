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
    """What lies over the disk while a RUN goes on, and is no part of it; what is written into it never gets onto the disk.

    `memory`: a tmpfs. `bind`: `source` of the context (the archive `files_hash`), or of `stage`. `cache`: what the last RUN with that
    `name` has left in it, at first `source` of `stage`, if one is named. `secret`: the content that the caller gives for `name`, as a
    file or in `variable`.
    """

    kind: Literal["bind", "cache", "memory", "secret"]
    target: str
    mode: int = 0o755
    owner: str = "0:0"
    source: str = "."
    stage: int | None = None
    files_hash: str = ""
    name: str = ""
    sharing: Literal["shared", "private", "locked"] = "shared"
    is_read_only: bool = False
    size_bytes: int = 0
    variable: str = ""
    is_required: bool = False

    @property
    def is_of_context(self) -> bool:
        """Whether the caller's files are mounted."""
        return self.kind == "bind" and self.stage is None

    def content(self) -> list[object]:
        """What a RUN with it depends on, but for the disk of `stage`: never what a secret or a cache holds."""
        what = [self.kind, self.target, self.mode, self.owner, self.source, self.stage is None, self.files_hash]
        return [*what, self.name, self.is_read_only, self.size_bytes, self.variable]


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
        return ["run", self.argv, self.variables, self.script, [mount.content() for mount in self.mounts]]


@dataclass(frozen=True, slots=True)
class Remote:
    """What ADD fetches: a file by HTTP, or what a git repository has at a revision (`https://host/repo.git#revision:folder`)."""

    url: str
    kind: Literal["file", "git"]
    checksum: str = ""  # SHA-256 in hex, or the commit
    keeps_git: bool = False

    def content(self) -> list[object]:
        """What is wanted; what it depends on is known once it is fetched."""
        return [self.url, self.kind, self.checksum, self.keeps_git]


@dataclass(frozen=True, slots=True)
class Copy:
    """Files that come in. Of `stage`, of the archive `files_hash` of the context, written in the Dockerfile (`inline`), or fetched.

    `owner` and `mode` empty leave those of the files as they are; `mode` is as `modes.apply_mode` takes it. `destination` ends with
    `/` when it can only be a folder. `unpacks`: sources that are archives are unpacked instead, fetched ones if `unpacks_remotes`.
    `parents`: the folders on the way to a source come with it. `is_apart`: no link of the destination is followed.
    """

    origin: Origin
    sources: tuple[str, ...]
    destination: str
    owner: str = ""
    mode: str = ""
    stage: int | None = None
    files_hash: str = ""
    inline: tuple[tuple[str, str], ...] = ()
    remotes: tuple[Remote, ...] = ()
    excludes: tuple[str, ...] = ()
    unpacks: bool = False
    unpacks_remotes: bool = False
    parents: bool = False
    is_apart: bool = False

    def content(self) -> list[object]:
        """What it depends on, but for the disk of `stage` and what `remotes` have."""
        how = [self.destination, self.owner, self.mode, self.excludes, self.unpacks, self.unpacks_remotes, self.parents, self.is_apart]
        return ["copy", self.sources, how, self.stage is None, self.files_hash, self.inline, [one.content() for one in self.remotes]]


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


def stages_of(action: Action) -> list[int]:
    """The stages whose disks an action reads, in the order of its text."""
    if isinstance(action, Copy):
        return [] if action.stage is None else [action.stage]
    return [mount.stage for mount in action.mounts if mount.stage is not None] if isinstance(action, Run) else []
