"""The nouns of template builds: what is asked for, how far it is, and what earlier builds have left for later ones. No I/O.

Invariants: a job moves `waiting` -> `building` -> `ready` or `error` and never back; one that has failed says why and where.
A step's key names everything its disk depends on, so two steps of one key may stand for each other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from agentenv.core.model import Context

BuildStatus = Literal["waiting", "building", "ready", "error"]
StepKind = Literal["RUN", "COPY", "ENV", "WORKDIR", "USER"]
STEP_KINDS: tuple[StepKind, ...] = ("RUN", "COPY", "ENV", "WORKDIR", "USER")
BASE_STEP, FINAL_STEP = "base", "finalize"  # beside the numbers of steps, from "1" on (contract section 2.7)
_KEY_VERSION = 2  # another one makes all cached steps useless: change it when a step's effect on the disk changes


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """Why a build came to nothing. `step` is `base`, `finalize`, a step's number, or empty when it was none of them.

    `on_build`: instructions of base images that need files of the context, by the line of their FROM: with those it may work.
    """

    message: str
    step: str = ""
    on_build: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MachineSize:
    """What a build asks for; None: as what it starts from has."""

    vcpu_count: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None


AS_BASE = MachineSize()
"""As what it starts from."""


@dataclass(frozen=True, slots=True)
class BuildJob:
    """One build of a template from the request to its end. Sizes that were not asked for are those of what it starts from."""

    build_id: str
    template_id: str
    name: str
    tags: tuple[str, ...]
    vcpu_count: int | None
    memory_mb: int | None
    created_at_ms: int
    updated_at_ms: int
    status: BuildStatus = "waiting"
    failure: BuildFailure | None = None
    disk_mb: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ("ready", "error")


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction. `force` runs it, and all after it, whatever is cached."""

    kind: StepKind
    arguments: tuple[str, ...]
    files_hash: str = ""
    force: bool = False

    def __str__(self) -> str:
        return " ".join((self.kind, *filter(None, self.arguments)))

    def content(self) -> list[object]:
        """What it depends on beside the disk and the context it begins with."""
        return [self.kind, self.arguments, self.files_hash]


@dataclass(frozen=True, slots=True)
class Registry:
    """Credentials for pulling one image; of which kind, and what that kind needs."""

    kind: Literal["registry", "aws", "gcp"]
    settings: dict[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class DockerfileSource:
    """A Dockerfile to build. `files` are hashes of the archives that its COPY and ADD need, by line.

    `starts`: its ENTRYPOINT and CMD are the start command, its HEALTHCHECK the ready command. `secrets` by id, for RUN --mount;
    `accounts` by registry, for FROM and --from. Both are kept nowhere.
    """

    text: str
    name: str = "Dockerfile"
    arguments: dict[str, str] = field(default_factory=dict)
    target: str = ""
    files: dict[int, str] = field(default_factory=dict)
    starts: bool = True
    secrets: dict[str, bytes] = field(default_factory=dict, repr=False)
    accounts: dict[str, Registry] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What one build does: start from an image or a template, go through steps, start a program, capture.

    With a Dockerfile, that says what it starts from and what the steps are.
    """

    from_image: str = ""
    from_template: str = ""
    registry: Registry | None = None
    steps: tuple[Step, ...] = ()
    start_command: str = ""
    ready_command: str = ""
    force: bool = False
    dockerfile: DockerfileSource | None = None


@dataclass(frozen=True, slots=True)
class CachedStep:
    """The disk after a step, and what commands after it start with. `snapshot_id` is of a disk alone."""

    key: str
    snapshot_id: str
    context: Context
    used_at_ms: int


def base_key(origin: str) -> str:
    """The key of what a build starts from; `origin` names its exact content."""
    return _digest([_KEY_VERSION, "base", origin])


def step_key(parent: str, content: list[object], context: Context, vcpu_count: int, memory_mb: int) -> str:
    """The key of a step after `parent`, for commands that start with `context` on a machine of that size."""
    return _digest([parent, *content, asdict(context), vcpu_count, memory_mb])


def _digest(content: list[object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
