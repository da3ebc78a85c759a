"""Stages of a Dockerfile: what each starts from, and which of them a target needs.

A name after FROM is an earlier stage, `scratch`, or an image; `template://NAME[:TAG]` is a template of the node, which no image
reference can look like. Names in `COPY --from` are stages, their numbers, or images likewise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentenv.core.errors import InvalidInput
from agentenv.template.dockerfile.document import DockerfileError, Document, Instruction, parse_held, parse_trigger
from agentenv.template.dockerfile.mount_words import mount_fields
from agentenv.template.dockerfile.scope import PLATFORM, PLATFORM_ARGUMENTS, Scope

TEMPLATE_SCHEME = "template://"
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Base:
    """What a stage starts from: the name of an image or template, or the number of a stage."""

    kind: Literal["image", "template", "stage", "scratch"]
    name: str = ""
    stage: int = -1


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. One without instructions or a line stands for an image that files are copied from."""

    index: int
    name: str
    base: Base
    line: int
    instructions: tuple[Instruction, ...] = ()

    def __str__(self) -> str:
        return self.name or f"stage-{self.index}"


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A Dockerfile with the caller's arguments. `stages` are those that the target needs, each after what it needs itself.

    `sources` has, for every `--from` of those stages, the stage that is meant by it: by line, then by word.
    """

    document: Document
    given: Mapping[str, str]
    outer: Mapping[str, str]
    stages: tuple[Stage, ...]
    sources: Mapping[tuple[int, str], int]
    warnings: tuple[str, ...] = ()

    @property
    def target(self) -> Stage:
        """The stage that becomes the template."""
        return self.stages[-1]

    def scope(self, env: Mapping[str, str], is_guess: bool = False) -> Scope:
        """What the words of a stage see at its beginning."""
        return Scope(self.document.escape, self.given, self.outer, env, is_guess=is_guess)


def read(document: Document, given: Mapping[str, str], target: str = "") -> Dockerfile:
    """The stages that `target` (a name or number; else the last one) needs. DockerfileError."""
    outer, rest = _outer_arguments(document, given)
    stages = _split(document, Scope(document.escape, given, outer, arguments=outer), rest)
    chosen = _chosen(document, stages, target)
    resolver = _Resolver(document, stages)
    needed = resolver.needed_by(chosen)
    declared = {word.partition("=")[0] for found in document.instructions if found.name == "ARG" for word in found.words}
    unused = sorted(set(given) - declared - Scope("", given, {}).proxies().keys() - PLATFORM_ARGUMENTS.keys())
    warnings = (*document.warnings, *(f"{document.name}: no ARG uses the build argument {name}" for name in unused))
    return Dockerfile(document, given, outer, needed, resolver.sources, warnings)


def with_triggers(dockerfile: Dockerfile, stage: Stage, held: Sequence[str]) -> Stage:
    """The stage with what ONBUILD of its base image has it do first; their line is that of its FROM. DockerfileError."""
    document = dockerfile.document
    triggers = tuple(parse_held(document, stage.line, text) for text in held)
    for found in triggers:
        if _from_words(document, found):
            message = f"ONBUILD of the image: `{found}` reads other stages or images, which it cannot name"
            raise document.error(stage.line, message, "write it into the Dockerfile")
    return replace(stage, instructions=(*triggers, *stage.instructions))


def parse_base(name: str) -> Base:
    """What a word names that is no stage. InvalidInput when it is empty."""
    if name.startswith(TEMPLATE_SCHEME):
        reference = name.removeprefix(TEMPLATE_SCHEME)
        if not reference:
            raise InvalidInput(f"{name!r} names no template", "write template://NAME or template://NAME:TAG")
        return Base("template", reference)
    if not name or any(c.isspace() or not c.isprintable() for c in name):
        raise InvalidInput(f"{name[:80]!r} is no name of an image", "is an ARG that it uses set before the first FROM?")
    return Base("scratch") if name == "scratch" else Base("image", name)


def _outer_arguments(document: Document, given: Mapping[str, str]) -> tuple[dict[str, str], Sequence[Instruction]]:
    """The arguments before the first FROM, those of the platform included, and all instructions from there on."""
    scope, values = Scope(document.escape, given, {}), dict(PLATFORM_ARGUMENTS)
    for at, found in enumerate(document.instructions):
        if found.name == "FROM":
            return values, document.instructions[at:]
        if found.name != "ARG":
            raise document.error(found.line, f"{found.name} stands before the first FROM", "only ARG may")
        for word in found.words:
            name, has_value, text = word.partition("=")
            seen = Scope(document.escape, given, values, arguments=values)
            value = scope.argument(name, _lexed(document, found, seen, text) if has_value else None)
            if value is not None:
                values[name] = value
    raise document.error(document.instructions[-1].line, "there is no FROM", "begin with FROM and an image")


def _split(document: Document, scope: Scope, rest: Sequence[Instruction]) -> list[Stage]:
    stages: list[Stage] = []
    for found in rest:
        if found.name != "FROM":
            last = stages[-1]
            stages[-1] = Stage(last.index, last.name, last.base, last.line, (*last.instructions, found))
            continue
        _, *rest_of_line = found.words or ("",)
        if not found.words or (rest_of_line and (len(rest_of_line) != 2 or rest_of_line[0].lower() != "as")):
            raise document.error(found.line, "FROM takes an image, and `AS name` if the stage has a name")
        name = rest_of_line[1].lower() if rest_of_line else ""
        if name and (not _STAGE_NAME.fullmatch(name) or name == "scratch"):
            raise document.error(found.line, f"{name!r} cannot be the name of a stage", "use letters, digits, `-`, `_` and `.`")
        if any(name and name == stage.name for stage in stages):
            raise document.error(found.line, f"there are two stages named {name!r}")
        platform = _lexed(document, found, scope, found.flag("platform", PLATFORM))
        if platform.removesuffix("/v1") not in (PLATFORM, "amd64", "x86_64", "linux/x86_64", "linux"):
            raise document.error(found.line, f"FROM: this node runs {PLATFORM}, not {platform}", f"leave --platform out, or say {PLATFORM}")
        stages.append(Stage(len(stages), name, _base(document, found, scope, stages), found.line))
    return stages


def _base(document: Document, found: Instruction, scope: Scope, earlier: Sequence[Stage]) -> Base:
    name = _lexed(document, found, scope, found.words[0])
    stage = next((stage for stage in earlier if stage.name and stage.name == name.lower()), None)
    if stage is not None:
        return Base("stage", stage=stage.index)
    try:
        return parse_base(name)
    except InvalidInput as error:
        raise document.error(found.line, f"FROM: {error.message}", error.hint) from error


def _chosen(document: Document, stages: Sequence[Stage], target: str) -> Stage:
    if not target:
        return stages[-1]
    for stage in stages:
        if stage.name == target.lower() or (target.isdecimal() and stage.index == int(target)):
            return stage
    names = ", ".join(map(str, stages))
    raise DockerfileError(f"{document.name} has no stage {target[:80]!r}", f"its stages: {names}")


class _Resolver:
    """Which stages a stage needs, and what every `--from` means."""

    def __init__(self, document: Document, stages: Sequence[Stage]) -> None:
        self._document, self._stages = document, list(stages)
        self.sources: dict[tuple[int, str], int] = {}

    def needed_by(self, chosen: Stage) -> tuple[Stage, ...]:
        """In an order in which each comes after those that it needs; the chosen one is the last."""
        order: dict[int, Stage] = {}
        self._visit(chosen, order)
        return tuple(order.values())

    def _visit(self, stage: Stage, order: dict[int, Stage]) -> None:
        """Only earlier stages can be named, so there is no circle."""
        if stage.index in order:
            return
        stage = self._with_triggers(stage)
        if stage.base.kind == "stage":
            self._visit(self._stages[stage.base.stage], order)
        for found in stage.instructions:
            for word in _from_words(self._document, found):
                self._visit(self._meant(stage, found, word), order)
        order[stage.index] = stage

    def _with_triggers(self, stage: Stage) -> Stage:
        """The stage with what ONBUILD of the stage it starts from has it do first."""
        if stage.base.kind != "stage":
            return stage
        onbuilds = [found for found in self._stages[stage.base.stage].instructions if found.name == "ONBUILD"]
        triggers = tuple(parse_trigger(self._document, found) for found in onbuilds)
        return Stage(stage.index, stage.name, stage.base, stage.line, (*triggers, *stage.instructions))

    def _meant(self, stage: Stage, found: Instruction, word: str) -> Stage:
        if "$" in word:
            raise self._document.error(
                found.line, f"--from={word}: variables are not replaced here", "FROM an image `AS` a name, and use the name"
            )
        for other in self._stages:
            is_named = bool(other.name) and other.name == word.lower()
            if not other.line or not (is_named or (word.isdecimal() and other.index == int(word))):
                continue
            if other.index >= stage.index:
                raise self._document.error(
                    found.line, f"--from={word} names a stage that is not before this one", "copy from earlier stages only"
                )
            self.sources[found.line, word] = other.index
            return other
        if word.isdecimal():
            raise self._document.error(found.line, f"--from={word}: there is no stage of that number")
        try:
            base = parse_base(word)
        except InvalidInput as error:
            raise self._document.error(found.line, f"--from: {error.message}", error.hint) from error
        if base.kind == "scratch":
            raise self._document.error(found.line, "--from=scratch: there is nothing in it")
        image = next((one for one in self._stages if not one.line and one.base == base), None)
        if image is None:
            image = Stage(len(self._stages), word, base, 0)
            self._stages.append(image)
        self.sources[found.line, word] = image.index
        return image


def _from_words(document: Document, found: Instruction) -> list[str]:
    if found.name == "COPY" and "from" in found.flags:
        return [found.flag("from")]
    try:
        mounts = [mount_fields(text) for text in found.flags.get("mount", ()) if "from=" in text]
    except InvalidInput as error:
        raise document.error(found.line, f"{found.name}: {error.message}", error.hint) from error
    return [fields["from"] for fields in mounts if "from" in fields]


def _lexed(document: Document, found: Instruction, scope: Scope, text: str) -> str:
    try:
        return scope.word(text)
    except InvalidInput as error:
        raise document.error(found.line, f"{found.name}: {error.message}", error.hint) from error
