"""COPY and ADD of Dockerfiles: archives become the one that the guest unpacks, with the names, owners and modes it shall have there.

A folder's content goes into the destination; a file becomes the destination, or goes into it if that is a folder; links stay
links. Nothing of an archive is unpacked on the host, but for archives that ADD unpacks: those are read from a file of their own.
"""

from __future__ import annotations

import lzma
import posixpath
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from e2b_dockerfile_utils import PatternMatcher

from agentenv.core.errors import InvalidInput
from agentenv.template.copying import Layout, Owner, members
from agentenv.template.dockerfile.actions import Copy
from agentenv.template.dockerfile.patterns import Parts, SourcePath, parse_source

_NO_ARCHIVE = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, TypeError)
_ZSTD_NAMES = (".tar.zst", ".tar.zstd", ".tzst")


@dataclass(frozen=True, slots=True)
class Piece:
    """An archive, and what of it is copied."""

    archive: Path
    sources: tuple[SourcePath, ...]

    @classmethod
    def of(cls, archive: Path, sources: tuple[str, ...]) -> Piece:
        """The sources as they stand in an action."""
        return cls(archive, tuple(map(parse_source, sources)))

    @classmethod
    def literal(cls, archive: Path, names: tuple[str, ...]) -> Piece:
        """Files by their names, in which nothing is a pattern."""
        return cls(archive, tuple(SourcePath(name, (name,), (None,)) for name in names))


@dataclass(slots=True)
class _Found:
    """What the archives have of the sources: files and folders, and the files that are archives themselves."""

    files: set[Parts] = field(default_factory=set)
    folders: set[Parts] = field(default_factory=set)
    archives: dict[Parts, Path] = field(default_factory=dict)


class Arrangement:
    """One COPY: `survey` first, then `write`. Both block. `scratch` is a folder for temporary files, which the caller removes."""

    def __init__(self, action: Copy, pieces: list[Piece], most_bytes: int, scratch: Path) -> None:
        self._action, self._pieces, self._most_bytes, self._scratch = action, pieces, most_bytes, scratch
        self._excludes = PatternMatcher(list(action.excludes))
        self._found = _Found()

    def survey(self) -> bool:
        """Whether there is anything to copy: patterns may match nothing. InvalidInput when a source is missing."""
        for piece in self._pieces:
            seen: set[str] = set()
            for reading, member, parts in members(piece.archive, self._most_bytes):
                for source, match, below in _matches(piece, parts):
                    seen.add(source.text)
                    if below or member.isdir():
                        self._found.folders.add(match)
                    else:
                        self._found.files.add(match)
                        if self._action.unpacks and member.isreg():
                            self._try_archive(match, reading, member)
            for source in piece.sources:
                if source.text not in seen and not source.is_pattern:
                    whose = "the stage" if self._action.stage is not None else "what was uploaded"
                    raise InvalidInput(f"{whose} has no {source.text[:200]!r}")
        return bool(self._found.files or self._found.folders)

    def layout(self, is_folder: bool) -> Layout:
        """Where everything goes when the destination is, or is not, a folder in the guest."""
        destination, found = self._action.destination, self._found
        folder = posixpath.normpath(destination)
        if is_folder or destination.endswith("/") or found.folders or found.archives or len(found.files) > 1:
            return Layout(folder)
        return Layout(posixpath.dirname(folder), posixpath.basename(folder))

    def write(self, output: Path, layout: Layout, owner: Owner | None) -> int:
        """The archive that is unpacked in `layout.folder`; returns how many entries it has. Owner None: everyone keeps theirs."""
        count = 0
        with tarfile.open(output, "w", format=tarfile.GNU_FORMAT) as written:
            for reading, member, name in self._placed(layout):
                member.name, member.pax_headers, member.uname, member.gname = name, {}, "", ""
                if owner is not None:
                    member.uid, member.gid = owner.uid, owner.gid
                if self._action.mode is not None and not member.issym():
                    member.mode = self._action.mode
                written.addfile(member, reading.extractfile(member) if member.isreg() else None)
                written.members = []  # type: ignore[attr-defined]  # the library would remember them all
                count += 1
        return count

    def _placed(self, layout: Layout) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]:
        for piece in self._pieces:
            for source in piece.sources:  # one after the other: later ones may replace files of those before
                alone = Piece(piece.archive, (source,))
                for reading, member, parts in members(piece.archive, self._most_bytes):
                    for _, match, below in _matches(alone, parts):
                        if (below and self._excludes.matches("/".join(below))) or match in self._found.archives:
                            continue
                        if member.islnk():
                            member.linkname = _linked(alone, layout, member.linkname)
                        yield reading, member, _name(layout, match, below, member.isdir())
        for archive in self._found.archives.values():
            for reading, member, parts in members(archive, self._most_bytes):
                yield reading, member, "/".join(parts) or "."

    def _try_archive(self, match: Parts, reading: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """A file that ADD unpacks is found out by its content."""
        if match[-1].lower().endswith(_ZSTD_NAMES):
            raise InvalidInput(f"{'/'.join(match)[:200]!r} is compressed by zstd, which ADD cannot unpack here", "use gzip or xz")
        path = self._scratch / f"added-{len(self._found.archives)}.tar"
        content = reading.extractfile(member)
        assert content is not None
        with path.open("wb") as file:
            shutil.copyfileobj(content, file)
        try:
            with tarfile.open(path) as archive:
                archive.next()
        except _NO_ARCHIVE:
            path.unlink()
        else:
            self._found.archives[match] = path


def _matches(piece: Piece, parts: Parts) -> Iterator[tuple[SourcePath, Parts, Parts]]:
    for source in piece.sources:
        if (matched := source.match(parts)) is not None:
            yield source, *matched


def _name(layout: Layout, match: Parts, below: Parts, is_folder: bool) -> str:
    """The name below the destination."""
    if below:
        return "/".join(below)
    return "." if is_folder else layout.name or match[-1]


def _linked(piece: Piece, layout: Layout, target: str) -> str:
    parts = tuple(part for part in target.split("/") if part not in ("", "."))
    for _, match, below in _matches(piece, parts):
        return _name(layout, match, below, is_folder=False)
    raise InvalidInput(f"a hard link leads to {target[:200]!r}, which is not among the files", "copy both")
