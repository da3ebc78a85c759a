"""Archives of builds: read with bounds, whoever made them, and written for guests with all that files have beside their content.

Extended attributes (capabilities and access control lists among them) travel as `SCHILY.xattr.*` records, times with their fractions,
and files with holes as their parts alone (GNU's sparse format 1.0). The guest's side is `native/crates/tarstream`.
"""

from __future__ import annotations

import copy
import lzma
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, cast

from agentenv.core.errors import InvalidInput

Parts = tuple[str, ...]
ENTRIES_MAX = 200_000
XATTR = "SCHILY.xattr."
_PARTS_MAX = 1 << 18  # of one file with holes
_HEADER_MAX_BYTES = 1 << 20  # of one extended header: names and link targets are far shorter
_BLOCK_BYTES = 512
UNREADABLE = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, TypeError, ValueError)  # TypeError: of a header that ends early


class _Member(tarfile.TarInfo):
    """An entry whose extended headers are bounded: the library reads them into memory whole."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        kinds = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type in kinds and self.size > _HEADER_MAX_BYTES:
            raise InvalidInput(f"COPY: the archive has a header of {self.size} bytes, more than {_HEADER_MAX_BYTES}")
        processed: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return processed

    def _proc_sparse(self, archive: Any) -> tarfile.TarInfo:
        """GNU's old format: the library reads on for as long as the archive says."""
        parts, goes_on, size_bytes = self._sparse_structs  # type: ignore[attr-defined]
        del self._sparse_structs  # type: ignore[attr-defined]
        while goes_on:
            block = archive.fileobj.read(_BLOCK_BYTES)
            pairs = [(tarfile.nti(block[at : at + 12]), tarfile.nti(block[at + 12 : at + 24])) for at in range(0, 504, 24)]  # type: ignore[attr-defined]
            parts += [pair for pair in pairs if pair[1]]
            if len(parts) > _PARTS_MAX:
                raise InvalidInput(f"COPY: a file of the archive has more than {_PARTS_MAX} parts")
            goes_on = bool(block[504])
        self.sparse = parts
        self.offset_data = archive.fileobj.tell()
        archive.offset = self.offset_data + self._block(self.size)  # type: ignore[attr-defined]
        self.size = size_bytes
        return self

    def _proc_gnusparse_10(self, following: Any, _headers: object, archive: Any) -> None:
        """GNU's format 1.0: the map is in the content, as lines of numbers in whole blocks."""
        text, numbers = archive.fileobj.read(_BLOCK_BYTES), list[int]()
        while not numbers or len(numbers) < 1 + 2 * numbers[0]:
            line, newline, rest = text.partition(b"\n")
            if newline:
                numbers.append(int(line))
                text = rest
            elif len(line) > 20 or not (block := archive.fileobj.read(_BLOCK_BYTES)):
                raise ValueError("a map of a file's parts has no end")
            else:
                text = line + block
            if numbers[:1] > [_PARTS_MAX]:
                raise InvalidInput(f"COPY: a file of the archive has more than {_PARTS_MAX} parts")
        following.offset_data = archive.fileobj.tell()
        following.sparse = list(zip(numbers[1::2], numbers[2::2], strict=True))


def members(archive: Path, content_max_bytes: int, *, special: bool = False) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, Parts]]:
    """All entries of an archive with the parts of their paths, which stay inside it. InvalidInput. Blocks.

    `special`: devices and pipes are welcome. Sizes are those of what is stored: holes take no space.
    """
    total_bytes = count = 0
    try:
        with archive.open("rb") as file, _open(file) as reading:
            while (member := reading.next()) is not None:
                reading.members = []  # type: ignore[attr-defined]
                count, total_bytes = count + 1, total_bytes + sum(length for _, length in stored_parts(member))
                if count > ENTRIES_MAX:
                    raise InvalidInput(f"COPY: the archive has more than {ENTRIES_MAX} files", "leave some out with .dockerignore")
                if total_bytes > content_max_bytes:
                    raise InvalidInput(f"COPY: the files have more than {content_max_bytes >> 20} MiB, which the disk cannot hold")
                if not (member.isreg() or member.isdir() or member.issym() or member.islnk() or (special and member.isdev())):
                    raise InvalidInput(f"COPY: {member.name[:200]!r} is neither file, folder nor link", "leave it out with .dockerignore")
                yield reading, member, parts_of(member.name)
    except (*UNREADABLE, OSError) as error:
        raise unreadable(error) from error


def unreadable(error: Exception) -> InvalidInput:
    """What to tell of an archive that the library cannot read."""
    return InvalidInput(f"COPY: the uploaded archive cannot be read: {error}", "upload the files again")


def parts_of(name: str) -> Parts:
    """The parts of a path in an archive. InvalidInput when it leaves the archive."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts:
        raise InvalidInput(f"COPY: the archive names {name[:200]!r}, which lies outside of it")
    return parts


def stored_parts(member: tarfile.TarInfo) -> Sequence[tuple[int, int]]:
    """Offsets and lengths of what an archive has of a file. InvalidInput when that contradicts its size."""
    sparse: Sequence[tuple[int, int]] | None = getattr(member, "sparse", None)
    if sparse is None:
        return [(0, member.size)] if member.isreg() and member.size else []
    end, parts = 0, [(offset, length) for offset, length in sparse if length]
    for offset, length in parts:
        if length < 0 or offset < end or offset + length > member.size:
            raise InvalidInput(f"COPY: the parts of {member.name[:200]!r} are out of order or outside of it", "make the archive again")
        end = offset + length
    return parts


class ArchiveWriter:
    """An archive for a guest. `close` ends it; the file stays the caller's. Blocks."""

    def __init__(self, output: IO[bytes], mode: Literal["w", "w:gz"] = "w") -> None:
        level: dict[str, Any] = {"compresslevel": 1} if mode == "w:gz" else {}
        self._tar = tarfile.open(  # noqa: SIM115 - `close` closes it
            fileobj=output, mode=mode, format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape", **level
        )

    def add(self, member: tarfile.TarInfo, content: IO[bytes] | None = None, *, is_packed: bool = False) -> None:
        """Add an entry; `content` is that of a file, at its beginning: holes included, or packed as `packed_content` has it. OSError."""
        added, parts = copy.copy(member), stored_parts(member)
        kept = {name: value for name, value in member.pax_headers.items() if name.startswith(XATTR) or name == "mtime"}
        added.uname = added.gname = ""
        added.pax_headers = {} if member.islnk() else kept
        if not member.isreg():
            added.size = 0
            self._tar.addfile(added)
        elif content is None:
            raise ValueError("a file has content")
        elif list(parts) == [(0, member.size)] or not member.size:
            added.type = tarfile.REGTYPE
            self._tar.addfile(added, content)
        else:
            self._add_sparse(added, parts, content, is_packed)
        self._tar.members = []  # type: ignore[attr-defined]  # the library would remember them all

    def close(self) -> None:
        """End the archive. Idempotent."""
        self._tar.close()

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_sparse(self, added: tarfile.TarInfo, parts: Sequence[tuple[int, int]], content: IO[bytes], is_packed: bool) -> None:
        numbers = [len(parts), *(number for part in parts for number in part)]
        text = "".join(f"{number}\n" for number in numbers).encode()
        text += bytes(-len(text) % _BLOCK_BYTES)
        sparse = {"major": "1", "minor": "0", "name": added.name, "realsize": str(added.size)}
        added.pax_headers = {**added.pax_headers, **{f"GNU.sparse.{name}": value for name, value in sparse.items()}}
        added.type, added.size = tarfile.REGTYPE, len(text) + sum(length for _, length in parts)
        self._tar.addfile(added, cast(IO[bytes], _PartsReader(text, parts, content, is_packed)))


class _PartsReader:
    """The stored form of a file with holes: its map, then its parts."""

    def __init__(self, text: bytes, parts: Sequence[tuple[int, int]], content: IO[bytes], is_packed: bool) -> None:
        self._text, self._content, self._is_packed = text, content, is_packed
        self._parts = list(reversed(parts))
        self._left_bytes = 0

    def read(self, wanted: int) -> bytes:
        """The next bytes, fewer at the end of a part."""
        pieces = bytearray(self._text[:wanted])
        self._text = self._text[wanted:]
        while len(pieces) < wanted and (self._left_bytes or self._parts):
            if not self._left_bytes:
                offset, self._left_bytes = self._parts.pop()
                if not self._is_packed:
                    self._content.seek(offset)
            piece = self._content.read(min(self._left_bytes, wanted - len(pieces)))
            if not piece:
                raise OSError("a file became shorter")
            pieces += piece
            self._left_bytes -= len(piece)
        return bytes(pieces)


def packed_content(reading: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes] | None:
    """The parts of a file that an archive has, one after the other; None for what is no file."""
    if not member.isreg():
        return None
    stored = copy.copy(member)
    stored.size, stored.sparse = sum(length for _, length in stored_parts(member)), None
    return reading.extractfile(stored)


def copy_content(reading: tarfile.TarFile, member: tarfile.TarInfo, output: Path) -> None:
    """What a file of an archive holds. OSError. Blocks."""
    content = reading.extractfile(member)
    if content is None:
        raise ValueError("a file has content")
    with output.open("wb") as file:
        shutil.copyfileobj(content, file)


def _open(file: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=file, mode="r|*", tarinfo=_Member, encoding="utf-8", errors="surrogateescape")
