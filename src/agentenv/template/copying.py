"""COPY: an uploaded archive becomes one whose names, owners and modes are what the guest shall have; the guest only unpacks it.

The archive is a caller's: nothing of it is ever unpacked on the host, and its size, its entries and its headers are bounded.
Sources and destinations are as in Dockerfiles: a folder's content goes into the destination, a file becomes the
destination or goes into it if that ends with `/` or is a folder, several files need a folder. Links stay links.
"""

from __future__ import annotations

import lzma
import posixpath
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agentenv.core.errors import InvalidInput

ENTRIES_MAX = 200_000
_HEADER_MAX_BYTES = 1 << 20  # of one extended header: names and link targets are far shorter
_GLOB = frozenset("*?[{(!")
_UNREADABLE = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, TypeError, ValueError)  # TypeError: of a header that ends early


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


class _Member(tarfile.TarInfo):
    """An entry whose extended headers are bounded: the library reads them into memory whole."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        kinds = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type in kinds and self.size > _HEADER_MAX_BYTES:
            raise InvalidInput(f"COPY: the archive has a header of {self.size} bytes, more than {_HEADER_MAX_BYTES}")
        processed: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return processed


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
        with tarfile.open(output, "w", format=tarfile.GNU_FORMAT) as written:
            for reading, member, parts in members(archive, content_max_bytes):
                name = _placed(source, layout, parts, member.isdir())
                if name is None:
                    continue
                member.name = name
                member.uid, member.gid, member.uname, member.gname = owner.uid, owner.gid, "", ""
                member.pax_headers = {}
                if owner.mode is not None and not member.issym():
                    member.mode = owner.mode
                if member.islnk():
                    member.linkname = _linked(source, layout, member.linkname)
                written.addfile(member, reading.extractfile(member) if member.isreg() else None)
                written.members = []  # type: ignore[attr-defined]  # the library would remember them all
                count += 1
    except _UNREADABLE as error:
        raise _unreadable(error) from error
    return count


def _unreadable(error: Exception) -> InvalidInput:
    return InvalidInput(f"COPY: the uploaded archive cannot be read: {error}", "upload the files again")


def members(archive: Path, content_max_bytes: int) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, tuple[str, ...]]]:
    """All entries of an archive with the parts of their paths, which stay inside it. InvalidInput. Blocks."""
    total_bytes = count = 0
    try:
        with archive.open("rb") as file, _open(file) as reading:
            while (member := reading.next()) is not None:
                reading.members = []  # type: ignore[attr-defined]
                count, total_bytes = count + 1, total_bytes + member.size
                if count > ENTRIES_MAX:
                    raise InvalidInput(f"COPY: the archive has more than {ENTRIES_MAX} files", "leave some out with .dockerignore")
                if total_bytes > content_max_bytes:
                    raise InvalidInput(f"COPY: the files have more than {content_max_bytes >> 20} MiB, which the disk cannot hold")
                if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                    raise InvalidInput(f"COPY: {member.name[:200]!r} is neither file, folder nor link", "leave it out with .dockerignore")
                yield reading, member, _parts(member.name)
    except (*_UNREADABLE, OSError) as error:
        raise _unreadable(error) from error


def _open(file: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=file, mode="r|*", tarinfo=_Member)


def _parts(name: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts:
        raise InvalidInput(f"COPY: the archive names {name[:200]!r}, which lies outside of it")
    return parts


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
    name = _placed(source, layout, _parts(target), is_folder=False)
    if name is None:
        raise InvalidInput(f"COPY: a hard link leads to {target[:200]!r}, which is not among the files", "copy both")
    return name
