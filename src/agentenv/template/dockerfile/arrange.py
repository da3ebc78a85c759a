"""COPY and ADD of Dockerfiles: archives become the one that the guest unpacks, with the names, owners and modes it shall have there.

A folder's content goes into the destination; a file becomes the destination, or goes into it if that is a folder; links stay
links, and two names of one file stay two names of it. Nothing of an archive is unpacked on the host, but for archives that ADD
unpacks: those are read from a file of their own.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from e2b_dockerfile_utils import PatternMatcher

from agentenv.core.errors import InvalidInput
from agentenv.template.copying import Layout, Owner
from agentenv.template.dockerfile.actions import Copy
from agentenv.template.dockerfile.modes import apply_mode
from agentenv.template.dockerfile.patterns import Parts, SourcePath, parse_source
from agentenv.template.tarballs import UNREADABLE, ArchiveWriter, copy_content, members, packed_content, parts_of

_ZSTD_NAMES = (".tar.zst", ".tar.zstd", ".tzst")
_Entry = tuple[tarfile.TarFile, tarfile.TarInfo, str]


@dataclass(frozen=True, slots=True)
class Piece:
    """An archive, and what of it is copied. `unpacks`: files of it that are archives are unpacked instead."""

    archive: Path
    sources: tuple[SourcePath, ...]
    unpacks: bool = False

    @classmethod
    def of(cls, archive: Path, action: Copy) -> Piece:
        """The sources as they stand in an action."""
        return cls(archive, tuple(parse_source(source, action.parents) for source in action.sources), action.unpacks)

    @classmethod
    def literal(cls, archive: Path, names: tuple[str, ...], unpacks: bool = False) -> Piece:
        """Files and folders by their names, in which nothing is a pattern."""
        return cls(archive, tuple(map(_literal, names)), unpacks)


@dataclass(slots=True)
class _Found:
    """What the archives have of the sources: files, folders, the folders above by source, and the files that are archives themselves."""

    files: set[Parts] = field(default_factory=set)
    folders: set[Parts] = field(default_factory=set)
    above: dict[str, set[Parts]] = field(default_factory=dict)
    archives: dict[Parts, Path] = field(default_factory=dict)
    linked: set[Path] = field(default_factory=set)  # archives with hard links


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
            for reading, member, parts in self._members(piece.archive):
                if member.islnk():
                    self._found.linked.add(piece.archive)
                for source, match, below in _matches(piece, parts):
                    seen.add(source.text)
                    if self._action.parents:
                        self._found.above.setdefault(source.text, set()).update(match[:count] for count in range(len(match)))
                    self._note(piece, match, below, reading, member)
            for source in piece.sources:
                if source.text not in seen and not source.is_pattern:
                    whose = "the stage" if self._action.stage is not None else "what was uploaded"
                    raise InvalidInput(f"{whose} has no {source.text[:200]!r}")
        return bool(self._found.files or self._found.folders)

    def layout(self, is_folder: bool) -> Layout:
        """Where everything goes when the destination is, or is not, a folder in the guest."""
        action, found = self._action, self._found
        folder = posixpath.normpath(action.destination)
        is_folder = is_folder and not action.is_apart  # what is there is not looked at then
        if is_folder or action.parents or action.destination.endswith("/") or found.folders or found.archives or len(found.files) > 1:
            return Layout(folder)
        return Layout(posixpath.dirname(folder), posixpath.basename(folder))

    def write(self, output: Path, layout: Layout, owner: Owner | None) -> int:
        """The archive that is unpacked in `layout.folder`; returns how many entries it has. Owner None: everyone keeps theirs."""
        count, mode = 0, self._action.mode
        with output.open("wb") as file, ArchiveWriter(file) as written:
            for reading, member, name in self._placed(layout):
                member.name = name
                if owner is not None:
                    member.uid, member.gid = owner.uid, owner.gid
                if mode and not member.issym():
                    member.mode = apply_mode(mode, member.mode, member.isdir())
                written.add(member, packed_content(reading, member), is_packed=True)
                count += 1
        return count

    def _members(self, archive: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, Parts]]:
        return members(archive, self._most_bytes, special=True)

    def _note(self, piece: Piece, match: Parts, below: Parts, reading: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        if below or member.isdir():
            self._found.folders.add(match)
            return
        self._found.files.add(match)
        if piece.unpacks and member.isreg():
            self._try_archive(match, reading, member)

    def _placed(self, layout: Layout) -> Iterator[_Entry]:
        for piece in self._pieces:
            for source in piece.sources:  # one after the other: later ones may replace files of those before
                yield from self._of_source(Piece(piece.archive, (source,)), layout)
        for archive in self._found.archives.values():
            for reading, member, parts in self._members(archive):
                yield reading, member, "/".join(parts) or "."

    def _of_source(self, alone: Piece, layout: Layout) -> Iterator[_Entry]:
        heirs = self._heirs(alone, layout) if alone.archive in self._found.linked else {}
        for reading, member, parts in self._members(alone.archive):
            name = heirs[parts] if parts in heirs else self._name(alone, layout, parts, member.isdir())
            if name is None:
                continue
            if member.islnk():
                target = parts_of(member.linkname)
                linked = heirs.get(target) or self._name(alone, layout, target, is_folder=False)
                if linked is None or linked == name:
                    continue  # it has the content itself
                member.linkname = linked
            yield reading, member, name

    def _heirs(self, alone: Piece, layout: Layout) -> dict[Parts, str]:
        """Files that are not copied but have other names that are: the first of those gets the content."""
        heirs: dict[Parts, str] = {}
        for _, member, parts in self._members(alone.archive):
            if not member.islnk() or (name := self._name(alone, layout, parts, is_folder=False)) is None:
                continue
            target = parts_of(member.linkname)
            if self._name(alone, layout, target, is_folder=False) is None:
                heirs.setdefault(target, name)
        return heirs

    def _name(self, alone: Piece, layout: Layout, parts: Parts, is_folder: bool) -> str | None:
        """The name below the destination; None for what is not copied."""
        (source,) = alone.sources
        parents, pivot = self._action.parents, source.pivot
        if (matched := source.match(parts)) is None:
            is_above = parents and is_folder and parts in self._found.above.get(source.text, ()) and len(parts) > pivot
            return "/".join(parts[pivot:]) if is_above else None
        match, below = matched
        if match in self._found.archives:
            return None
        inner = parts[pivot:] if parents else below or (() if is_folder else match[-1:])
        if inner and self._excludes.matches("/".join(inner)):
            return None
        if parents or below:
            return "/".join(inner) or "."
        return "." if is_folder else layout.name or match[-1]

    def _try_archive(self, match: Parts, reading: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """A file that ADD unpacks is found out by its content."""
        if match[-1].lower().endswith(_ZSTD_NAMES):
            raise InvalidInput(f"{'/'.join(match)[:200]!r} is compressed by zstd, which ADD cannot unpack here", "use gzip or xz")
        path = self._scratch / f"added-{len(self._found.archives)}.tar"
        copy_content(reading, member, path)
        try:
            with tarfile.open(path) as archive:
                archive.next()
        except (*UNREADABLE, OSError):
            path.unlink()
        else:
            self._found.archives[match] = path


def _literal(name: str) -> SourcePath:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    return SourcePath(name, parts, (None,) * len(parts))


def _matches(piece: Piece, parts: Parts) -> Iterator[tuple[SourcePath, Parts, Parts]]:
    for source in piece.sources:
        if (matched := source.match(parts)) is not None:
            yield source, *matched
