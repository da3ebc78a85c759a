"""What a build needs of its context, known before the build: the client uploads that and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentenv.core.model import Context
from agentenv.template.dockerfile.actions import Action, Copy, Run
from agentenv.template.dockerfile.evaluate import Evaluated, State, evaluate
from agentenv.template.dockerfile.scope import UNKNOWN
from agentenv.template.dockerfile.stages import Dockerfile, with_triggers

_ROOT = State(Context("root", "/"))


@dataclass(frozen=True, slots=True)
class Need:
    """The files of one COPY, ADD or RUN: of the context, below its root."""

    line: int
    sources: tuple[str, ...]
    excludes: tuple[str, ...] = ()
    parents: bool = False


def evaluated(dockerfile: Dockerfile, on_build: Mapping[int, Sequence[str]]) -> dict[int, Evaluated]:
    """All stages as far as they can be known without what they start from. DockerfileError."""
    found: dict[int, Evaluated] = {}
    for stage in dockerfile.stages:
        if stage.line in on_build:
            stage = with_triggers(dockerfile, stage, on_build[stage.line])
        base = found[stage.base.stage].state if stage.base.kind == "stage" else _ROOT
        found[stage.index] = evaluate(dockerfile, stage, base, {}, is_guess=True)
    return found


def needs(dockerfile: Dockerfile, on_build: Mapping[int, Sequence[str]] | None = None) -> list[Need]:
    """One for every line that copies from the context, in their order. DockerfileError: one depends on what only the node knows.

    `on_build` are the instructions of base images that are carried out after FROM, by its line, as far as they are known.
    """
    found: dict[int, Need] = {}
    for stage in evaluated(dockerfile, on_build or {}).values():
        for action in stage.actions:
            for need in _needs_of(action):
                for text in (*need.sources, *need.excludes):
                    _check_known(dockerfile, need.line, text)
                before = found.get(need.line)  # ONBUILD: one line, several stages; RUN: several mounts
                if before is None:
                    found[need.line] = need
                else:
                    sources = tuple(dict.fromkeys((*before.sources, *need.sources)))
                    found[need.line] = Need(need.line, sources, (), before.parents or need.parents)
    return [found[line] for line in sorted(found)]


def _needs_of(action: Action) -> list[Need]:
    line = action.origin.line
    if isinstance(action, Copy) and action.stage is None and action.sources:
        return [Need(line, action.sources, action.excludes, action.parents)]
    if isinstance(action, Run):
        return [Need(line, (mount.source,)) for mount in action.mounts if mount.is_of_context]
    return []


def _check_known(dockerfile: Dockerfile, line: int, text: str) -> None:
    if UNKNOWN in text:
        name = text.split(UNKNOWN)[1]
        message = f"the source uses ${name}, which is set neither by ARG nor by ENV before it"
        raise dockerfile.document.error(line, message, f"write ARG {name} before it")
