"""RUN: the program it runs, with its shell, heredocs and arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping

from e2b_dockerfile_utils import parse_heredoc

from agentenv.core.errors import InvalidInput
from agentenv.template.dockerfile.actions import Origin, Run
from agentenv.template.dockerfile.document import Instruction
from agentenv.template.dockerfile.mount_words import parse_mount
from agentenv.template.dockerfile.scope import Scope

SCRIPTS_FOLDER = "/dev/shm"
"""Where a heredoc that begins with `#!` is put: in memory, so it is never part of a disk."""


def run_action(found: Instruction, scope: Scope, shell: tuple[str, ...], workdir: str, stages: Mapping[str, int], files_hash: str) -> Run:
    """What a RUN does. Its mounts are of `stages`, by name, and of the context: the archive of that hash. InvalidInput."""
    _check_flags(found)
    if not found.words or not "".join(found.words).strip():
        raise InvalidInput("a command is needed")
    mounts = tuple(parse_mount(scope.word(text), workdir, stages, files_hash) for text in found.flags.get("mount", ()))
    variables = {name: value for name, value in scope.arguments.items() if name not in scope.env}
    unkeyed = {name: value for name, value in scope.proxies().items() if name not in scope.env and name not in variables}
    script = None
    if found.is_json:
        argv = found.words
    else:
        line, script = _line(found)
        argv = (*shell, line)
    return Run(Origin(found.line, str(found)), argv, tuple(sorted(variables.items())), tuple(sorted(unkeyed.items())), script, mounts)


def _line(found: Instruction) -> tuple[str, tuple[str, str] | None]:
    """The line for the shell, and the script it needs."""
    line = found.words[0]
    if not found.heredocs:
        return line, None
    first = found.heredocs[0]
    if parse_heredoc(line.strip()) is None:
        return "\n".join((line, *(f"{heredoc.raw}{heredoc.name}" for heredoc in found.heredocs))), None
    if not first.content.startswith("#!"):
        return first.content, None
    path = f"{SCRIPTS_FOLDER}/{re.sub(r'[^A-Za-z0-9_.-]', '_', first.name)}"
    return path, (path, first.content)


def _check_flags(found: Instruction) -> None:
    if (network := found.flag("network", "default")) != "default":
        raise InvalidInput(f"--network={network} is not supported: a build has the node's network", "leave it out")
    if (security := found.flag("security", "sandbox")) not in ("sandbox", "insecure"):  # a VM: root may do anything in it
        raise InvalidInput(f"--security={security}: sandbox or insecure")
