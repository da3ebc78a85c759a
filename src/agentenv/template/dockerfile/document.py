"""The instructions of a Dockerfile with their lines and flags, and errors that show the line they are about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from e2b_dockerfile_utils import (
    DockerfileHeredoc,
    DockerfileInstruction,
    DockerfileSyntaxError,
    chomp_heredoc_content,
    parse_dockerfile_ast,
)

from agentenv.core.errors import InvalidInput

TEXT_MAX_CHARS = 1 << 20
_SHOWN_CHARS = 200  # of a line in an error
FlagKind = Literal["text", "many", "bool", "refused"]

_COPY_FLAGS: Mapping[str, FlagKind] = {
    "chown": "text",
    "chmod": "text",
    "from": "text",
    "link": "bool",
    "exclude": "many",
    "parents": "bool",
}
_FLAGS: Mapping[str, Mapping[str, FlagKind]] = {
    "FROM": {"platform": "text"},
    "RUN": {"mount": "many", "network": "text", "security": "text", "device": "refused"},
    "COPY": _COPY_FLAGS,
    "ADD": {**_COPY_FLAGS, "from": "refused", "unpack": "bool", "checksum": "text", "keep-git-dir": "bool"},
    "HEALTHCHECK": dict.fromkeys(("interval", "timeout", "start-period", "start-interval", "retries"), "text"),
}


class DockerfileError(InvalidInput):
    """What is wrong with a Dockerfile; the message names file and line, and shows the line."""


@dataclass(frozen=True, slots=True)
class Heredoc:
    """The text of a heredoc, without the tabs that `<<-` takes away. `expands`: its variables are replaced."""

    name: str
    content: str
    expands: bool
    raw: str  # with those tabs


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `words` are as the parser of its kind cuts them, quotes and variables untouched.

    `flags` has lists for those that may be repeated, else one text; a boolean one is `true` or `false`.
    """

    name: str
    line: int
    text: str
    words: tuple[str, ...]
    is_json: bool
    flags: Mapping[str, tuple[str, ...]]
    heredocs: tuple[Heredoc, ...]

    def __str__(self) -> str:
        return " ".join(self.text.split())

    def flag(self, name: str, default: str = "") -> str:
        """The value of a flag that is given once at most."""
        return self.flags.get(name, (default,))[0]

    def is_set(self, name: str, default: bool = False) -> bool:
        """Whether a boolean flag is on."""
        return self.flag(name, "true" if default else "false") == "true"


@dataclass(frozen=True, slots=True)
class Document:
    """A Dockerfile as text. `name` is how errors call it."""

    name: str
    text: str
    escape: str
    instructions: tuple[Instruction, ...]
    warnings: tuple[str, ...] = ()

    def error(self, line: int, message: str, hint: str = "") -> DockerfileError:
        """An error about that line, which it shows."""
        return _error(self.name, self.text, line, message, hint)

    def where(self, line: int) -> str:
        """The line as errors name and show it."""
        return _where(self.name, self.text, line)


def parse(text: str, name: str = "Dockerfile") -> Document:
    """The instructions of a Dockerfile. DockerfileError."""
    if len(text) > TEXT_MAX_CHARS:
        raise DockerfileError(f"{name}: {len(text)} characters, more than {TEXT_MAX_CHARS}", "a Dockerfile has instructions only")
    if "\0" in text:
        raise DockerfileError(f"{name}: it holds a NUL, so it is no text", "name a Dockerfile with --file")
    try:
        ast = parse_dockerfile_ast(text)
    except DockerfileSyntaxError as error:
        line = error.line or 1
        message = str(error).removeprefix(f"Dockerfile parse error on line {line}: ").removeprefix("Dockerfile parse error: ")
        raise _error(name, text, line, message) from error
    if not ast.instructions:
        raise DockerfileError(f"{name}: there is no instruction in it", "begin with FROM")
    document = Document(name, text, ast.escape_token, (), tuple(f"{name}:{w.line}: {w.message}" for w in ast.warnings))
    return replace(document, instructions=tuple(_instruction(document, found) for found in ast.instructions))


def parse_trigger(document: Document, onbuild: Instruction) -> Instruction:
    """The instruction that an ONBUILD holds. DockerfileError."""
    _, *rest = onbuild.text.split(maxsplit=1)
    return parse_held(document, onbuild.line, rest[0] if rest else "")


def parse_held(document: Document, line: int, held: str) -> Instruction:
    """An instruction that was kept for those who start from its image; errors name `line`. DockerfileError."""
    if not held:
        raise document.error(line, "ONBUILD needs an instruction")
    try:
        (found,) = parse_dockerfile_ast(f"# escape={document.escape}\n{held}").instructions
    except (DockerfileSyntaxError, ValueError) as error:
        raise document.error(line, f"ONBUILD: `{held[:_SHOWN_CHARS]}` is not one instruction") from error
    if found.name in ("ONBUILD", "FROM", "MAINTAINER"):
        raise document.error(line, f"{found.name} is not allowed in ONBUILD")
    found.start_line = line
    return _instruction(document, found)


def _instruction(document: Document, found: DockerfileInstruction) -> Instruction:
    return Instruction(
        found.name,
        found.start_line,
        found.original.strip(),
        tuple(found.args),
        found.json,
        _flags(document, found),
        tuple(map(_heredoc, found.heredocs)),
    )


def _heredoc(found: DockerfileHeredoc) -> Heredoc:
    content = chomp_heredoc_content(found.content) if found.chomp else found.content
    return Heredoc(found.name, content, found.expand, found.content)


def _flags(document: Document, found: DockerfileInstruction) -> Mapping[str, tuple[str, ...]]:
    known, flags = _FLAGS.get(found.name, {}), dict[str, tuple[str, ...]]()
    for flag in found.flags:
        name, has_value, value = flag.removeprefix("--").partition("=")
        kind = known.get(name)
        if kind is None or kind == "refused":
            word = "unknown flag" if kind is None else "not supported:"
            names = ", ".join(f"--{name}" for name, kind in known.items() if kind != "refused")
            raise document.error(found.start_line, f"{found.name}: {word} --{name}", f"{found.name} takes {names or 'no flags'}")
        if name in flags and kind != "many":
            raise document.error(found.start_line, f"{found.name}: --{name} is given twice")
        if kind == "bool":
            value = value or "true"
            if value not in ("true", "false"):
                raise document.error(found.start_line, f"{found.name}: --{name} is true or false, not {value!r}")
        elif not has_value or not value:
            raise document.error(found.start_line, f"{found.name}: --{name} needs a value", f"write --{name}=VALUE")
        flags[name] = (*flags.get(name, ()), value)
    return flags


def _error(name: str, text: str, line: int, message: str, hint: str = "") -> DockerfileError:
    return DockerfileError(f"{name}:{line}: {message}\n{_where(name, text, line).partition(chr(10))[2]}", hint)


def _where(name: str, text: str, line: int) -> str:
    lines = text.split("\n")
    shown = lines[line - 1].rstrip("\r")[:_SHOWN_CHARS] if 0 < line <= len(lines) else ""
    return f"{name}:{line}\n  {line} | {shown}"
