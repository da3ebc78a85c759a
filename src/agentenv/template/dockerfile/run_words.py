"""RUN: the program it runs, with its shell, heredocs, arguments, and folders that are not part of the disk."""

from __future__ import annotations

import posixpath
import re

from e2b_dockerfile_utils import parse_heredoc

from agentenv.core.errors import InvalidInput
from agentenv.template.dockerfile.actions import Mount, Origin, Run
from agentenv.template.dockerfile.document import Instruction
from agentenv.template.dockerfile.scope import UNKNOWN, Scope

SCRIPTS_FOLDER = "/dev/shm"
"""Where a heredoc that begins with `#!` is put: in memory, so it is never part of a disk."""
_TARGET_NAMES, _SIZE_NAMES = ("target", "dst", "destination"), ("size",)
_OF_CACHE = (*_TARGET_NAMES, "id", "sharing", "uid", "gid", "mode", "type")
_OF_TMPFS = (*_TARGET_NAMES, *_SIZE_NAMES, "type")


def run_action(found: Instruction, scope: Scope, shell: tuple[str, ...], workdir: str) -> Run:
    """What a RUN does. InvalidInput."""
    _check_flags(found)
    if not found.words or not "".join(found.words).strip():
        raise InvalidInput("a command is needed")
    mounts = tuple(_mount(scope.word(text), workdir) for text in found.flags.get("mount", ()))
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


def _mount(text: str, workdir: str) -> Mount:
    if UNKNOWN in text:
        return Mount("cache", UNKNOWN)
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        fields[name.strip().lower()] = value
    kind = fields.get("type", "bind")
    if kind not in ("cache", "tmpfs"):
        hints = {
            "bind": "COPY the files first, and remove them in the same RUN that uses them",
            "secret": "give it as a variable of the sandboxes that need it, not of the template",
            "ssh": "fetch what needs the key before the build, and COPY it",
        }
        raise InvalidInput(f"--mount of type {kind[:20]!r} is not supported: cache and tmpfs are", hints.get(kind, ""))
    unknown = sorted(set(fields) - set(_OF_CACHE if kind == "cache" else _OF_TMPFS))
    if unknown:
        raise InvalidInput(f"--mount=type={kind}: {unknown[0]!r} is not supported")
    target = next((fields[name] for name in _TARGET_NAMES if fields.get(name)), "")
    if not target:
        raise InvalidInput("--mount needs a target", "write --mount=type=cache,target=/path")
    path = posixpath.normpath(posixpath.join("/", workdir, target))
    if path == "/":
        raise InvalidInput("--mount cannot have / as its target")
    uid, gid, mode = fields.get("uid", "0"), fields.get("gid", "0"), fields.get("mode", "0755")
    if not (uid.isdecimal() and gid.isdecimal() and re.fullmatch(r"[0-7]{1,5}", mode)):
        raise InvalidInput("--mount: uid and gid are numbers, mode is one in octal")
    return Mount("cache" if kind == "cache" else "memory", path, int(mode, 8), f"{uid}:{gid}")
