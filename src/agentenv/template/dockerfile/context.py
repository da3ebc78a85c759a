"""The context of a build on the client's disk: what .dockerignore leaves of it, and archives of what COPY needs.

Links inside the context stay links; a source that is one itself is followed, and cannot leave the context. Whatever BuildKit sends
of a file is in the archive: attributes, further names, holes, devices and pipes; sockets are not. An archive's hash names all
that but times, so the same files are always the same archive to the node.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from e2b_dockerfile_utils import PatternMatcher

from agentenv.core.errors import InvalidInput, NotFound
from agentenv.template.dockerfile.needs import Need
from agentenv.template.dockerfile.patterns import Parts, SourcePath, parse_source
from agentenv.template.tarballs import XATTR, ArchiveWriter

_LINKS_MAX = 40
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 512  # what `st_blocks` counts in
_ATTRIBUTES = ("user.", "system.posix_acl_", "security.capability")  # others belong to the machine they are on


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that is uploaded: under which name, where it is, and its extended attributes."""

    name: str
    path: Path
    status: os.stat_result
    attributes: dict[str, bytes] = field(default_factory=dict)


class BuildContext:
    """A folder, seen through an ignore file."""

    def __init__(self, root: Path, patterns: list[str]) -> None:
        self._root = root
        try:
            self._ignored = PatternMatcher(patterns)
        except ValueError as error:
            raise InvalidInput(str(error), "mend the ignore file") from error

    @classmethod
    def open(cls, root: Path, dockerfile: Path | None) -> BuildContext:
        """The folder with the ignore file that goes before: `<dockerfile>.dockerignore` beside it, else `.dockerignore`. InvalidInput."""
        own = dockerfile.with_name(f"{dockerfile.name}.dockerignore") if dockerfile is not None else None
        for path in (own, root / ".dockerignore"):
            if path is not None and path.is_file():
                try:
                    return cls(root, path.read_text(encoding="utf-8-sig").splitlines())
                except (OSError, UnicodeDecodeError) as error:
                    raise InvalidInput(f"{path} cannot be read: {error}") from error
        return cls(root, [])

    def entries(self, need: Need) -> list[Entry]:
        """All that a COPY needs, sorted. NotFound names what is missing, InvalidInput what cannot be uploaded."""
        excludes = PatternMatcher(list(need.excludes))
        found: dict[str, Entry] = {}
        for text in need.sources:
            source = parse_source(text, need.parents)
            matches = list(self._matches(source))
            if not matches and not source.is_pattern:
                raise NotFound(*self._missing(text))
            for name, real in matches:
                for count in range(1, len(name)) if need.parents else ():
                    above = self._entry(name[:count], self._resolved(name[:count]) or ())
                    found.setdefault(above.name, above)
                for below, entry in self._tree(name, real, real):
                    if not below or not excludes.matches(below):
                        found.setdefault(entry.name, entry)
        return sorted(found.values(), key=lambda entry: entry.name.split("/"))

    def _matches(self, source: SourcePath) -> Iterator[tuple[Parts, Parts]]:
        """The names of what a source means, and where each is once links are followed."""
        if source.deep is not None:
            yield from self._deep_matches(source)
            return
        names: list[Parts] = [()]
        for at in range(len(source.parts)):
            deeper: list[Parts] = []
            for name in names:
                folder = self._resolved(name)
                if folder is None:
                    continue
                path = self._root.joinpath(*folder)
                if source.patterns[at] is None:
                    deeper.append((*name, source.parts[at]))
                elif path.is_dir():
                    deeper += [(*name, child) for child in _names(path) if source.fits(at, child)]
            names = deeper
        for name in names:
            real = self._resolved(name)
            if real is not None and os.path.lexists(self._root.joinpath(*real)) and self._is_wanted(real):
                yield name, real

    def _deep_matches(self, source: SourcePath) -> Iterator[tuple[Parts, Parts]]:
        for name, real in self._matches(parse_source(source.above())):
            for deeper in (real, *self._walk(real)):
                parts = (*name, *deeper[len(real) :])
                if (matched := source.match(parts)) is not None and matched == (parts, ()):
                    yield parts, deeper

    def _resolved(self, parts: Parts) -> Parts | None:
        """Where a path leads, every link followed inside the context; None when links go in a circle."""
        todo, done, links = list(parts[::-1]), list[str](), 0
        while todo:
            part = todo.pop()
            if part == "..":
                done = done[:-1]
                continue
            if part in ("", "."):
                continue
            path = self._root.joinpath(*done, part)
            if not path.is_symlink():
                done.append(part)
                continue
            links += 1
            if links > _LINKS_MAX:
                return None
            target = os.fspath(path.readlink())
            if target.startswith("/"):
                done = []
            todo += target.split("/")[::-1]
        return tuple(done)

    def _is_wanted(self, parts: Parts) -> bool:
        """Whether an entry, or something below it, is not ignored."""
        path = "/".join(parts)
        if not parts or not self._ignored.matches(path):
            return True
        return self._root.joinpath(*parts).is_dir() and self._ignored.may_match_under(path) and any(self._walk(parts))

    def _walk(self, parts: Parts) -> Iterator[Parts]:
        """What of a folder's content is not ignored, at any depth."""
        for child in _names(self._root.joinpath(*parts)):
            deeper = (*parts, child)
            path, place = "/".join(deeper), self._root.joinpath(*deeper)
            is_ignored = self._ignored.matches(path)
            is_folder = place.is_dir() and not place.is_symlink()
            if not is_ignored and not place.is_socket():
                yield deeper
            if is_folder and (not is_ignored or self._ignored.may_match_under(path)):
                yield from self._walk(deeper)

    def _tree(self, name: Parts, real: Parts, top: Parts) -> Iterator[tuple[str, Entry]]:
        """An entry and what is in it: the path below the source, and the entry."""
        yield "", self._entry(name, real)
        if not self._root.joinpath(*real).is_dir():
            return
        seen: set[Parts] = set()
        for deeper in self._walk(real):
            for end in range(len(real) + 1, len(deeper) + 1):  # folders that are ignored, but not all they hold
                part = deeper[:end]
                if part not in seen:
                    seen.add(part)
                    yield "/".join(part[len(top) :]), self._entry((*name, *part[len(real) :]), part)

    def _entry(self, name: Parts, real: Parts) -> Entry:
        path = self._root.joinpath(*real)
        status = path.lstat()
        if stat.S_ISSOCK(status.st_mode):
            raise InvalidInput(f"{str(path)!r} is a socket, which cannot be copied", "leave it out with .dockerignore")
        return Entry("/".join(name) or ".", path, status, _attributes(path))

    def _missing(self, text: str) -> tuple[str, str]:
        parts = parse_source(text).parts
        real = self._resolved(parts)
        if real is not None and os.path.lexists(self._root.joinpath(*real)):
            return f"{text[:200]!r} is left out by the ignore file", "mend .dockerignore"
        return f"the context has no {text[:200]!r}", f"paths are those below {self._root}"


def hash_of(entries: list[Entry]) -> str:
    """The name of an archive of these entries: SHA-256 in hex. InvalidInput when one cannot be read. Blocks."""
    digest = hashlib.sha256(b"agentenv build files 2\n")
    firsts = _first_names(entries)
    for entry in entries:
        mode, name = entry.status.st_mode, os.fsencode(entry.name)
        digest.update(f"{len(name)} {stat.S_IFMT(mode):o} {stat.S_IMODE(mode):o} ".encode() + name)
        for key, value in sorted(entry.attributes.items()):
            digest.update(f" {len(key)} {len(value)} {key}".encode(errors="surrogateescape") + value)
        if entry.name in firsts:
            digest.update(b"= " + os.fsencode(firsts[entry.name]))
        elif stat.S_ISLNK(mode):
            digest.update(b"> " + os.fsencode(entry.path.readlink()))
        elif stat.S_ISREG(mode):
            digest.update(f" {entry.status.st_size} ".encode())
            with _opened(entry) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        elif not stat.S_ISDIR(mode):
            digest.update(f" {entry.status.st_rdev}".encode())
        digest.update(b"\n")
    return digest.hexdigest()


def write_archive(entries: list[Entry], output: IO[bytes]) -> None:
    """A compressed tar of the entries. InvalidInput when a file changes or goes meanwhile. Blocks."""
    firsts = _first_names(entries)
    with ArchiveWriter(output, "w:gz") as archive:
        for entry in entries:
            info = _info(entry, firsts.get(entry.name, ""))
            if not info.isreg():
                archive.add(info)
                continue
            with _opened(entry) as file:
                try:
                    if entry.status.st_blocks * _BLOCK_BYTES < entry.status.st_size:
                        info.sparse = _parts(file, info.size)  # type: ignore[assignment]
                    archive.add(info, file)
                except OSError as error:
                    raise InvalidInput(f"{str(entry.path)!r} changed while it was read: {error}", "build again") from error


def _info(entry: Entry, first_name: str) -> tarfile.TarInfo:
    info, status = tarfile.TarInfo(entry.name), entry.status
    info.mode, info.mtime = stat.S_IMODE(status.st_mode), status.st_mtime_ns // 1_000_000_000
    whole_s, ns = divmod(abs(status.st_mtime_ns), 1_000_000_000)
    info.pax_headers = {"mtime": f"{'-' if status.st_mtime_ns < 0 else ''}{whole_s}.{ns:09}"} if ns else {}
    for name, value in entry.attributes.items():
        info.pax_headers[XATTR + name] = value.decode(errors="surrogateescape")
    kinds = {
        stat.S_IFDIR: tarfile.DIRTYPE,
        stat.S_IFIFO: tarfile.FIFOTYPE,
        stat.S_IFCHR: tarfile.CHRTYPE,
        stat.S_IFBLK: tarfile.BLKTYPE,
    }
    if first_name:
        info.type, info.linkname = tarfile.LNKTYPE, first_name
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.fspath(entry.path.readlink())
    elif stat.S_ISREG(status.st_mode):
        info.size = status.st_size
    else:
        info.type = kinds[stat.S_IFMT(status.st_mode)]
        info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return info


def _first_names(entries: list[Entry]) -> dict[str, str]:
    """Of files with several names: the first name among the entries, by the later ones."""
    firsts: dict[tuple[int, int], str] = {}
    later: dict[str, str] = {}
    for entry in entries:
        if entry.status.st_nlink > 1 and not stat.S_ISDIR(entry.status.st_mode):
            first = firsts.setdefault((entry.status.st_dev, entry.status.st_ino), entry.name)
            if first != entry.name:
                later[entry.name] = first
    return later


def _parts(file: IO[bytes], size_bytes: int) -> list[tuple[int, int]]:
    """Where a file has data."""
    parts, at = list[tuple[int, int]](), 0
    while at < size_bytes:
        try:
            start = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        at = min(os.lseek(file.fileno(), start, os.SEEK_HOLE), size_bytes)
        if start >= at:
            break
        parts.append((start, at - start))
    file.seek(0)
    return parts


def _attributes(path: Path) -> dict[str, bytes]:
    """The extended attributes that go with a file; none where the client has no calls for them. InvalidInput: one cannot be read."""
    if not hasattr(os, "listxattr"):
        return {}
    try:
        names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(_ATTRIBUTES)]
        return {name: os.getxattr(path, name, follow_symlinks=False) for name in names}
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return {}
        raise InvalidInput(
            f"the attributes of {str(path)!r} cannot be read: {error.strerror}", "leave it out with .dockerignore"
        ) from error


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InvalidInput(
            f"{str(folder)!r} cannot be read: {error.strerror}", "leave it out with .dockerignore, or mend its mode"
        ) from error


def _opened(entry: Entry) -> IO[bytes]:
    try:
        return os.fdopen(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise InvalidInput(
            f"{str(entry.path)!r} cannot be read: {error.strerror}", "leave it out with .dockerignore, or mend its mode"
        ) from error
