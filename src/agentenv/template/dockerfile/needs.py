"""What a build needs of its context, known before the build: the client uploads that and no more."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.core.model import Context
from agentenv.template.dockerfile.actions import Copy
from agentenv.template.dockerfile.evaluate import Evaluated, State, evaluate
from agentenv.template.dockerfile.scope import UNKNOWN
from agentenv.template.dockerfile.stages import Dockerfile

_ROOT = State(Context("root", "/"))


@dataclass(frozen=True, slots=True)
class Need:
    """The files of one COPY or ADD: of the context, below its root."""

    line: int
    sources: tuple[str, ...]
    excludes: tuple[str, ...]


def evaluated(dockerfile: Dockerfile) -> dict[int, Evaluated]:
    """All stages as far as they can be known without what they start from. DockerfileError."""
    found: dict[int, Evaluated] = {}
    for stage in dockerfile.stages:
        base = found[stage.base.stage].state if stage.base.kind == "stage" else _ROOT
        found[stage.index] = evaluate(dockerfile, stage, base, {}, is_guess=True)
    return found


def needs(dockerfile: Dockerfile) -> list[Need]:
    """One for every line that copies from the context, in their order. DockerfileError: one depends on what only the node knows."""
    found: dict[int, Need] = {}
    for stage in evaluated(dockerfile).values():
        for action in stage.actions:
            if not isinstance(action, Copy) or action.stage is not None or not action.sources:
                continue
            line = action.origin.line
            for text in (*action.sources, *action.excludes):
                if UNKNOWN in text:
                    name = text.split(UNKNOWN)[1]
                    raise dockerfile.document.error(
                        line, f"the source uses ${name}, which is set neither by ARG nor by ENV before it", f"write ARG {name} before it"
                    )
            before = found.get(line, Need(line, (), ()))  # ONBUILD: one line, several stages
            sources = tuple(dict.fromkeys((*before.sources, *action.sources)))
            found[line] = Need(line, sources, () if line in found else action.excludes)
    return [found[line] for line in sorted(found)]
