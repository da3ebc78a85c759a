"""COPY and ADD: where files come from, where they go, and whose they are."""

from __future__ import annotations

import posixpath
import re

from e2b_dockerfile_utils import PatternMatcher, parse_heredoc

from agentenv.core.errors import InvalidInput
from agentenv.template.dockerfile.actions import Copy, Origin
from agentenv.template.dockerfile.document import Instruction
from agentenv.template.dockerfile.scope import UNKNOWN, Scope

ROOT = "0:0"
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://|git@", re.IGNORECASE)
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?")


def copy_action(found: Instruction, scope: Scope, workdir: str, stage: int | None, files_hash: str) -> Copy:
    """What a COPY or ADD does; its files are `stage`'s, or in the archive of that hash. InvalidInput."""
    if len(found.words) < 2:
        raise InvalidInput("a source and a destination are needed")
    *words, last = found.words
    if not found.is_json and parse_heredoc(last) is not None:
        raise InvalidInput("a heredoc cannot be the destination")
    sources, inline = _sources(found, scope, words)
    if inline and stage is not None:
        raise InvalidInput("--from does not go with a heredoc")
    for source in sources if found.name == "ADD" else ():
        if _REMOTE.match(source):
            raise InvalidInput(f"{source[:200]!r} is not in the context: ADD does not fetch", "fetch it with RUN, by curl, wget or git")
    destination = _destination(scope.word(last), workdir)
    if len(words) > 1 and not destination.endswith("/"):
        raise InvalidInput("several sources need a folder: the destination must end with /", f"write {scope.word(last)}/")
    return Copy(
        Origin(found.line, str(found)),
        tuple(sources),
        destination,
        owner=_owner(found, scope, stage),
        mode=_mode(found, scope),
        stage=stage,
        files_hash=files_hash,
        inline=tuple(inline),
        excludes=_excludes(found, scope),
        unpacks=found.name == "ADD" and found.is_set("unpack", default=True),
    )


def _sources(found: Instruction, scope: Scope, words: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Paths below the root of the context or stage, and files that are written in the Dockerfile."""
    sources, inline = list[str](), list[tuple[str, str]]()
    contents = {heredoc.name: heredoc for heredoc in found.heredocs}
    for word in words:
        heredoc = None if found.is_json else parse_heredoc(word)
        if heredoc is not None and heredoc.name in contents:
            text = contents[heredoc.name]
            inline.append((_file_name(heredoc.name), scope.heredoc(text.content) if text.expands else text.content))
            continue
        source = scope.word(word)
        if not source:
            raise InvalidInput(f"the source {word!r} is empty", "is an ARG that it uses set?")
        is_remote = found.name == "ADD" and _REMOTE.match(source)
        sources.append(source if is_remote else _below_root(source))
    return sources, inline


def _file_name(name: str) -> str:
    if "/" in name or name in (".", ".."):
        raise InvalidInput(f"a heredoc named {name[:80]!r} cannot be a file")
    return name


def _below_root(source: str) -> str:
    """`..` cannot leave the root, as in BuildKit."""
    return posixpath.normpath("/" + source.lstrip("/")).lstrip("/") or "."


def _destination(word: str, workdir: str) -> str:
    if not word:
        raise InvalidInput("the destination is empty", "is an ARG that it uses set?")
    is_folder = word.endswith("/") or posixpath.basename(word) in (".", "..")
    path = posixpath.normpath(posixpath.join("/", workdir, word)).replace("//", "/")
    return path + "/" if is_folder and path != "/" else path


def _owner(found: Instruction, scope: Scope, stage: int | None) -> str:
    """`user:group`; empty: as in the stage. A number without a group is also the group's."""
    if "chown" not in found.flags:
        return ROOT if stage is None else ""
    owner = scope.word(found.flag("chown"))
    if UNKNOWN not in owner and not _OWNER.fullmatch(owner):
        raise InvalidInput(f"--chown={owner[:80]}: it is user or user:group", "is an ARG that it uses set?")
    return f"{owner}:{owner}" if owner.isdecimal() else owner


def _mode(found: Instruction, scope: Scope) -> int | None:
    if "chmod" not in found.flags:
        return None
    mode = scope.word(found.flag("chmod"))
    if UNKNOWN in mode:
        return None
    if not re.fullmatch(r"0?[0-7]{1,4}", mode):
        raise InvalidInput(f"--chmod={mode[:80]}: only modes in octal are supported", "write --chmod=755")
    return int(mode, 8)


def _excludes(found: Instruction, scope: Scope) -> tuple[str, ...]:
    patterns = tuple(scope.word(text) for text in found.flags.get("exclude", ()))
    try:
        PatternMatcher(list(patterns))
    except ValueError as error:
        raise InvalidInput(f"--exclude: {error}") from error
    return patterns
