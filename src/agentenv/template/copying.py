"""COPY: an uploaded archive becomes one whose names, owners and modes are what the guest shall have; the guest only unpacks it.

The archive is a caller's: nothing of it is ever unpacked on the host, and its size, its entries and its headers are bounded.
Sources and destinations are as in Dockerfiles: a folder's content goes into the destination, a file becomes the
destination or goes into it if that ends with `/` or is a folder, several files need a folder. Links stay links.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.errors import InvalidInput
from agentenv.template.tarballs import UNREADABLE, ArchiveWriter, members, packed_content, parts_of, unreadable

_GLOB = frozenset("*?[{(!")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose the copied files are, and their mode if one was asked for."""

    uid: int
    gid: int
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a COPY step. `prefix` are the parts before the first pattern, `depth` how many parts name one match.

    Without a pattern `depth` is 0 and `prefix` the path itself. A pattern with `**` matches at any depth (`depth` None).
    """

    text: str
    prefix: tuple[str, ...]
    depth: int | None

    @classmethod
    def parse(cls, text: str) -> Source:
        """InvalidInput when it leaves the folder that was uploaded."""
        parts = tuple(part for part in posixpath.normpath(text.strip().lstrip("/") or ".").split("/") if part != ".")
        if ".." in parts:
            raise InvalidInput(f"COPY: the source {text[:200]!r} lies outside the build's files", "name files below the build's folder")
        first = next((at for at, part in enumerate(parts) if _GLOB & set(part)), len(parts))
        if first == len(parts):
            return cls(text, parts, 0)
        return cls(text, parts[:first], None if "**" in parts else len(parts) - first)

    def match(self, parts: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """What part of an entry's path names a match, and what comes below it; None when it belongs to none."""
        at = len(self.prefix)
        if parts[:at] != self.prefix:
            return None
        if self.depth is None:
            return (parts, ()) if len(parts) > at else None
        end = at + self.depth
        return (parts[:end], parts[end:]) if len(parts) >= end else None


Found = dict[tuple[str, ...], bool]
"""What the archive has of a source: its matches, in order, and whether each is a folder."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything goes: below `folder`; the one file that is renamed has `name`."""

    folder: str
    name: str = ""


def survey(archive: Path, source: Source, content_max_bytes: int) -> Found:
    """What there is of `source`. InvalidInput: nothing, no archive, too much in it. Blocks."""
    found: Found = {}
    for _, member, parts in members(archive, content_max_bytes):
        if (matched := source.match(parts)) is None:
            continue
        match, below = matched
        if not below and not member.isdir():
            found.setdefault(match, False)
        elif source.depth is not None or not member.isdir():
            found[match] = True
    if not found:
        raise InvalidInput(f"COPY: the uploaded files have no {source.text[:200]!r}", "check the path, and .dockerignore")
    return found


def lay_out(found: Found, source: Source, destination: str, is_folder: bool) -> Layout:
    """Where it goes when `destination` is absolute and, in the guest, is a folder or not. InvalidInput."""
    into = is_folder or destination.endswith("/") or posixpath.basename(destination) in (".", "..")
    folder = posixpath.normpath(destination)
    if any(found.values()) or into or source.depth is None:
        return Layout(folder)
    if len(found) > 1:
        return Layout(folder)  # several files: the destination can only be a folder
    return Layout(posixpath.dirname(folder), posixpath.basename(folder))


def rewrite(archive: Path, output: Path, source: Source, layout: Layout, owner: Owner, content_max_bytes: int) -> int:
    """Write the archive that the guest unpacks in `layout.folder`; returns how many entries it has. InvalidInput, OSError. Blocks."""
    count = 0
    try:
        with output.open("wb") as file, ArchiveWriter(file) as written:
            for reading, member, parts in members(archive, content_max_bytes):
                name = _placed(source, layout, parts, member.isdir())
                if name is None:
                    continue
                member.name, member.uid, member.gid = name, owner.uid, owner.gid
                if owner.mode is not None and not member.issym():
                    member.mode = owner.mode
                if member.islnk():
                    member.linkname = _linked(source, layout, member.linkname)
                written.add(member, packed_content(reading, member), is_packed=True)
                count += 1
    except UNREADABLE as error:
        raise unreadable(error) from error
    return count


def _placed(source: Source, layout: Layout, parts: tuple[str, ...], is_folder: bool) -> str | None:
    """The name below the destination of what has the path `parts`; None: it is not part of the source."""
    if (matched := source.match(parts)) is None:
        return None
    match, below = matched
    if source.depth is None:
        return "/".join(match[len(source.prefix) :])
    if below:
        return "/".join(below)
    if is_folder:
        return "."
    return layout.name or match[-1]


def _linked(source: Source, layout: Layout, target: str) -> str:
    """A hard link's target under its new name; the archive has it, since it has the link."""
    name = _placed(source, layout, parts_of(target), is_folder=False)
    if name is None:
        raise InvalidInput(f"COPY: a hard link leads to {target[:200]!r}, which is not among the files", "copy both")
    return name
