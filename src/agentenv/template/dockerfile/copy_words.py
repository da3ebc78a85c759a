"""COPY and ADD: where files come from, where they go, and whose they are."""

from __future__ import annotations

import posixpath
import re

from e2b_dockerfile_utils import PatternMatcher, parse_heredoc

from agentenv.core.errors import InvalidInput
from agentenv.template.dockerfile.actions import Copy, Origin
from agentenv.template.dockerfile.document import Instruction
from agentenv.template.dockerfile.modes import check_mode
from agentenv.template.dockerfile.remotes import is_remote, parse_remote
from agentenv.template.dockerfile.scope import UNKNOWN, Scope

ROOT = "0:0"
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
    urls = [source for source in sources if found.name == "ADD" and is_remote(source)]
    checksum, keeps_git = scope.word(found.flag("checksum")), found.is_set("keep-git-dir")
    if checksum and (len(words) > 1 or not urls):
        raise InvalidInput("--checksum goes with one source, which is fetched")
    remotes = tuple(parse_remote(url, checksum, keeps_git) for url in urls)
    destination = _destination(scope.word(last), workdir)
    if len(words) > 1 and not destination.endswith("/"):
        raise InvalidInput("several sources need a folder: the destination must end with /", f"write {scope.word(last)}/")
    return Copy(
        Origin(found.line, str(found)),
        tuple(source for source in sources if source not in urls),
        destination,
        owner=_owner(found, scope, stage),
        mode=_mode(found, scope),
        stage=stage,
        files_hash=files_hash,
        inline=tuple(inline),
        remotes=remotes,
        excludes=_excludes(found, scope),
        unpacks=found.name == "ADD" and found.is_set("unpack", default=True),
        unpacks_remotes=found.name == "ADD" and found.is_set("unpack"),
        parents=found.is_set("parents"),
        is_apart=found.is_set("link"),
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
        sources.append(source if found.name == "ADD" and is_remote(source) else _below_root(source, found.is_set("parents")))
    return sources, inline


def _file_name(name: str) -> str:
    if "/" in name or name in (".", ".."):
        raise InvalidInput(f"a heredoc named {name[:80]!r} cannot be a file")
    return name


def _below_root(source: str, parents: bool = False) -> str:
    """`..` cannot leave the root, as in BuildKit. With --parents the first `/./` says what is not kept."""
    before, pivot, after = source.partition("/./") if parents else (source, "", "")
    plain = posixpath.normpath("/" + before.lstrip("/")).lstrip("/") or "."
    return f"{plain}/./{_below_root(after)}" if pivot else plain


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


def _mode(found: Instruction, scope: Scope) -> str:
    mode = scope.word(found.flag("chmod"))
    return "" if "chmod" not in found.flags or UNKNOWN in mode else check_mode(mode)


def _excludes(found: Instruction, scope: Scope) -> tuple[str, ...]:
    patterns = tuple(scope.word(text) for text in found.flags.get("exclude", ()))
    try:
        PatternMatcher(list(patterns))
    except ValueError as error:
        raise InvalidInput(f"--exclude: {error}") from error
    return patterns
