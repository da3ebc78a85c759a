"""From the instructions of a stage to its actions. Nothing that runs can change what later instructions mean, so all of it is known
once the base is: its user, its folder, its variables.

Not part of a template, and said so where they stand: EXPOSE (every port can be reached), VOLUME, STOPSIGNAL, MAINTAINER, ONBUILD (of the
last stage). HEALTHCHECK is the ready command. ENTRYPOINT with CMD is the start command.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from agentenv.core.errors import InvalidInput
from agentenv.core.model import Context
from agentenv.template.dockerfile.actions import Action, Become, MakeFolder, Origin
from agentenv.template.dockerfile.copy_words import copy_action
from agentenv.template.dockerfile.document import Instruction
from agentenv.template.dockerfile.run_words import run_action
from agentenv.template.dockerfile.scope import UNKNOWN, Scope
from agentenv.template.dockerfile.stages import Dockerfile, Stage

SHELL = ("/bin/sh", "-c")
_VARIABLE = re.compile(r"[^\s=]+")
_PORT = re.compile(r"\d{1,5}(-\d{1,5})?(/(tcp|udp|sctp))?", re.IGNORECASE)
_IGNORED = ("MAINTAINER", "VOLUME", "EXPOSE", "STOPSIGNAL", "ONBUILD")


@dataclass(frozen=True, slots=True)
class Program:
    """CMD or ENTRYPOINT: with arguments of its own, or a line for a shell."""

    argv: tuple[str, ...]
    is_shell: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """What the instructions so far leave for those after them, and for stages that start from this one."""

    context: Context
    arguments: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()  # arguments without a value
    shell: tuple[str, ...] = SHELL
    command: Program | None = None
    entrypoint: Program | None = None
    has_program: bool = False  # of its own: that of the base alone is not started
    ready: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> str:
        """What ENTRYPOINT and CMD run, as one line for a shell; empty when there is none."""
        entrypoint, command = self.entrypoint, self.command
        if not self.has_program:
            argv: tuple[str, ...] = ()
        elif entrypoint is None:
            argv = command.argv if command is not None else ()
        elif entrypoint.is_shell:
            argv = entrypoint.argv
        else:
            argv = (*entrypoint.argv, *(command.argv if command is not None else ()))
        return f"exec {shlex.join(argv)}" if argv else ""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The actions of a stage, what they leave, and what is to be said about instructions that do nothing here."""

    actions: tuple[Action, ...]
    state: State
    notes: tuple[str, ...]


def evaluate(dockerfile: Dockerfile, stage: Stage, base: State, files: Mapping[int, str], is_guess: bool = False) -> Evaluated:
    """What is to be done for a stage that starts with `base`. `files` are the hashes of the archives that its COPYs need, by line.

    `is_guess`: the base's own variables are not known; what depends on them is marked (see `scope`). DockerfileError.
    """
    evaluator = _Evaluator(dockerfile, base, files, is_guess)
    for found in stage.instructions:
        try:
            evaluator.take(found)
        except InvalidInput as error:
            if error.message.startswith(f"{dockerfile.document.name}:"):
                raise
            raise dockerfile.document.error(found.line, f"{found.name}: {error.message}", error.hint) from error
    return Evaluated(tuple(evaluator.actions), evaluator.state, tuple(evaluator.notes))


class _Evaluator:
    def __init__(self, dockerfile: Dockerfile, base: State, files: Mapping[int, str], is_guess: bool) -> None:
        self._dockerfile, self._files, self._is_guess = dockerfile, files, is_guess
        self.state = base
        self.actions: list[Action] = []
        self.notes: list[str] = []
        self._has_own_command = False

    @property
    def scope(self) -> Scope:
        """What the words of the next instruction see."""
        beginning = self._dockerfile.scope(self.state.context.env_vars, self._is_guess)
        return replace(beginning, arguments=self.state.arguments, unset=self.state.unset)

    def take(self, found: Instruction) -> None:
        """Go on by one instruction. InvalidInput."""
        takes: Mapping[str, Callable[[Instruction], None]] = {
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
            "ENV": self._env,
            "ARG": self._arg,
            "WORKDIR": self._workdir,
            "USER": self._user,
            "SHELL": self._shell,
            "CMD": self._cmd,
            "ENTRYPOINT": self._entrypoint,
            "HEALTHCHECK": self._healthcheck,
            "LABEL": self._label,
        } | dict.fromkeys(_IGNORED, self._ignore)
        takes[found.name](found)

    def _run(self, found: Instruction) -> None:
        stages = {word: stage for (line, word), stage in self._dockerfile.sources.items() if line == found.line}
        files_hash = self._files.get(found.line, "")
        self.actions.append(run_action(found, self.scope, self.state.shell, self.state.context.workdir, stages, files_hash))

    def _copy(self, found: Instruction) -> None:
        stage = self._dockerfile.sources.get((found.line, found.flag("from")))
        self.actions.append(copy_action(found, self.scope, self.state.context.workdir, stage, self._files.get(found.line, "")))

    def _env(self, found: Instruction) -> None:
        variables = _pairs(found, self.scope)
        for name, _ in variables:
            if not _VARIABLE.fullmatch(name):
                raise InvalidInput(f"{name[:80]!r} is not the name of a variable")
        self._become(Become(_origin(found), variables=variables))

    def _arg(self, found: Instruction) -> None:
        if not found.words:
            raise InvalidInput("a name is needed", "write ARG NAME or ARG NAME=VALUE")
        arguments, unset, scope = dict(self.state.arguments), set(self.state.unset), self.scope
        for word in found.words:
            name, has_value, text = word.partition("=")
            name = scope.word(name)
            if not _VARIABLE.fullmatch(name):
                raise InvalidInput(f"{word[:80]!r} is not NAME or NAME=VALUE")
            value = scope.argument(name, scope.word(text) if has_value else None)
            if value is None:
                unset.add(name)
            else:
                arguments[name] = value
        self.state = replace(self.state, arguments=arguments, unset=frozenset(unset - arguments.keys()))

    def _workdir(self, found: Instruction) -> None:
        path = self.scope.word(_only_word(found, "a path"))
        if not path:
            raise InvalidInput("the path is empty")
        path = posixpath.normpath(posixpath.join("/", self.state.context.workdir, path)).replace("//", "/")
        self.actions.append(MakeFolder(_origin(found), path))
        self.state = replace(self.state, context=replace(self.state.context, workdir=path))

    def _user(self, found: Instruction) -> None:
        user = self.scope.word(_only_word(found, "a user, or user:group")).strip()
        if not user or any(c.isspace() for c in user):
            raise InvalidInput(f"{user[:80]!r} is not user or user:group")
        self._become(Become(_origin(found), user=user))

    def _shell(self, found: Instruction) -> None:
        if not found.is_json or not found.words:
            raise InvalidInput("the shell is a list of words in JSON", 'write SHELL ["/bin/bash", "-c"]')
        self.state = replace(self.state, shell=found.words)

    def _cmd(self, found: Instruction) -> None:
        self.state = replace(self.state, command=self._program(found), has_program=True)
        self._has_own_command = True

    def _entrypoint(self, found: Instruction) -> None:
        """It makes a CMD that another stage has set useless."""
        command = self.state.command if self._has_own_command else None
        self.state = replace(self.state, entrypoint=self._program(found), command=command, has_program=True)

    def _healthcheck(self, found: Instruction) -> None:
        kind, *rest = found.words or ("",)
        if kind.upper() == "NONE":
            if rest:
                raise InvalidInput("NONE takes no arguments")
            self.state = replace(self.state, ready="")
        elif kind.upper() == "CMD" and rest and rest[0]:
            self.state = replace(self.state, ready=shlex.join(rest) if found.is_json else rest[0])
        else:
            raise InvalidInput("NONE, or CMD and a command, is needed")

    def _label(self, found: Instruction) -> None:
        self.state = replace(self.state, labels={**self.state.labels, **dict(_pairs(found, self.scope))})

    def _ignore(self, found: Instruction) -> None:
        if found.name != "MAINTAINER" and not found.words and found.name != "ONBUILD":
            raise InvalidInput("an argument is needed")
        for word in map(self.scope.word, found.words if found.name == "EXPOSE" else ()):
            for port in word.split():
                if UNKNOWN not in port and not _PORT.fullmatch(port):
                    raise InvalidInput(f"{port[:80]!r} is not a port, as 80, 8000-8010 or 53/udp")
        if found.name in ("VOLUME", "STOPSIGNAL"):
            self.notes.append(f"{self._dockerfile.document.name}:{found.line}: {found.name} has no effect in a template")

    def _become(self, action: Become) -> None:
        self.actions.append(action)
        self.state = replace(self.state, context=action.applied(self.state.context))

    def _program(self, found: Instruction) -> Program:
        """BuildKit takes an empty one as none."""
        if found.is_json or not found.words:
            return Program(found.words)
        return Program((*self.state.shell, found.words[0]), is_shell=True)


def _pairs(found: Instruction, scope: Scope) -> tuple[tuple[str, str], ...]:
    """Names and values of ENV and LABEL: all of them see what was before the instruction."""
    if not found.words:
        raise InvalidInput("a name and a value are needed", f"write {found.name} NAME=VALUE")
    return tuple((scope.word(name), scope.word(value)) for name, value in zip(found.words[::3], found.words[1::3], strict=True))


def _only_word(found: Instruction, what: str) -> str:
    if len(found.words) != 1:
        raise InvalidInput(f"{what} is needed")
    return found.words[0]


def _origin(found: Instruction) -> Origin:
    return Origin(found.line, str(found))
