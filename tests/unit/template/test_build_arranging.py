"""What COPY keeps of files: attributes, times, holes, devices, and that two names of a file stay two names of it."""

from __future__ import annotations

import io
import itertools
import tarfile
from pathlib import Path

import pytest

from agentenv.core.errors import InvalidInput
from agentenv.template import tarballs
from agentenv.template.copying import Owner
from agentenv.template.dockerfile.actions import Copy, Origin
from agentenv.template.dockerfile.arrange import Arrangement, Piece
from agentenv.template.tarballs import ArchiveWriter, members, packed_content, stored_parts

MIB = 1 << 20
Given = tuple[str, bytes, str, dict[str, str]]


def made(folder: Path, *given: Given) -> Path:
    """An archive of entries: name, type, target of a link or content, pax records."""
    path = folder / "given.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, text, records in given:
            info = tarfile.TarInfo(name)
            info.type, info.uid, info.gid, info.mtime, info.pax_headers = kind, 3, 4, 77, dict(records)
            if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE):
                info.linkname = text
            info.size = len(text) if kind == tarfile.REGTYPE else 0
            info.devmajor, info.devminor = 1, 3
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def file(name: str, text: str = "", **records: str) -> Given:
    return (name, tarfile.REGTYPE, text, records)


def link(name: str, target: str) -> Given:
    return (name, tarfile.LNKTYPE, target, {})


def copied(folder: Path, archive: Path, *sources: str, owner: Owner | None = None, **how: object) -> list[tuple[str, str]]:
    """Names in the guest's archive, and what each is: the content, or the target of a link."""
    action = Copy(Origin(1, "COPY"), sources, "/to/", stage=0, **how)
    arrangement = Arrangement(action, [Piece.of(archive, action)], MIB, folder)
    assert arrangement.survey()
    arrangement.write(folder / "out.tar", arrangement.layout(False), owner)
    with tarfile.open(folder / "out.tar") as written:
        return [
            (m.name, f"-> {m.linkname}" if m.islnk() or m.issym() else written.extractfile(m).read().decode() if m.isreg() else "")
            for m in written.getmembers()
        ]


LINKED = (file("a/one", "content"), link("a/two", "a/one"), link("b/three", "a/one"), link("b/four", "./a/one"))


@pytest.mark.parametrize(
    ("sources", "how", "expected"),
    [
        (("a", "b"), {}, [("one", "content"), ("two", "-> one"), ("four", "-> three"), ("three", "content")]),
        (("b",), {}, [("three", "content"), ("four", "-> three")]),
        (("a/two",), {}, [("two", "content")]),
        (("b/f*",), {}, [("four", "content")]),
        (("a",), {"excludes": ("one",)}, [("two", "content")]),
        (("b",), {"excludes": ("three",)}, [("four", "content")]),
        (("b",), {"parents": True}, [("b/three", "content"), ("b/four", "-> b/three")]),
        ((".",), {}, [("a/one", "content"), ("a/two", "-> a/one"), ("b/three", "-> a/one"), ("b/four", "-> a/one")]),
    ],
)
def test_names_of_one_file(tmp_path: Path, sources: tuple[str, ...], how: dict[str, object], expected: list[tuple[str, str]]):
    assert sorted(copied(tmp_path, made(tmp_path, *LINKED), *sources, **how)) == sorted(expected)


def test_the_content_of_a_link_comes_before_the_link(tmp_path: Path):
    names = [name for name, what in copied(tmp_path, made(tmp_path, *LINKED), "b")]
    assert names == ["three", "four"]


@pytest.mark.parametrize("owner", [None, Owner(9, 8)])
def test_attributes_times_devices_and_modes(tmp_path: Path, owner: Owner | None):
    odd = b"\x01\x00\n=\xff".decode(errors="surrogateescape")
    archive = made(
        tmp_path,
        ("d", tarfile.DIRTYPE, "", {"SCHILY.xattr.user.d": "x"}),
        file("d/f", "x", **{"SCHILY.xattr.security.capability": odd, "mtime": "12.000000345", "comment": "gone"}),
        ("d/null", tarfile.CHRTYPE, "", {}),
        ("d/pipe", tarfile.FIFOTYPE, "", {}),
        ("d/link", tarfile.SYMTYPE, "/f", {"SCHILY.xattr.trusted.l": "y"}),
    )
    copied(tmp_path, archive, "d", owner=owner, mode="u=rwX,go=")
    with tarfile.open(tmp_path / "out.tar") as written:
        found = {member.name: member for member in written.getmembers()}
    assert list(found) == [".", "f", "null", "pipe", "link"]
    assert {(member.uid, member.gid) for member in found.values()} == {(owner.uid, owner.gid) if owner else (3, 4)}
    assert found["."].pax_headers == {"SCHILY.xattr.user.d": "x"}
    records = found["f"].pax_headers
    assert records["SCHILY.xattr.security.capability"].encode(errors="surrogateescape") == b"\x01\x00\n=\xff"
    assert (records["mtime"], "comment" in records) == ("12.000000345", False)
    assert (found["null"].type, found["null"].devmajor, found["null"].devminor) == (tarfile.CHRTYPE, 1, 3)
    assert found["pipe"].isfifo()
    assert found["link"].pax_headers == {"SCHILY.xattr.trusted.l": "y"}
    assert [f"{found[name].mode:o}" for name in (".", "f", "link")] == ["700", "600", "644"]


MAPS = [[(0, 5)], [(4096, 4096), (1 << 29, 7)], [], [((1 << 30) - 1, 1)], [(offset, 10) for offset in range(0, 1 << 20, 1 << 13)]]


@pytest.mark.parametrize("parts", MAPS, ids=len)
def test_holes(tmp_path: Path, parts: list[tuple[int, int]]):
    source = tmp_path / "sparse"
    with source.open("wb") as content:
        content.truncate(1 << 30)
        for number, (offset, length) in enumerate(parts):
            content.seek(offset)
            content.write(bytes([number % 255 + 1]) * length)
    info = tarfile.TarInfo("d/sparse")
    info.size, info.sparse = 1 << 30, parts
    with (tmp_path / "given.tar").open("wb") as output, source.open("rb") as content, ArchiveWriter(output) as writing:
        writing.add(info, content)
        writing.add(tarfile.TarInfo("d/after"), io.BytesIO())
    action = Copy(Origin(1, "COPY"), ("d",), "/to")
    arrangement = Arrangement(action, [Piece.of(tmp_path / "given.tar", action)], MIB, tmp_path)
    assert arrangement.survey(), "what is bounded is what is stored"
    arrangement.write(tmp_path / "out.tar", arrangement.layout(False), None)
    assert (tmp_path / "out.tar").stat().st_size < MIB
    found = list(members(tmp_path / "out.tar", MIB))
    assert [member.name for _, member, _ in found] == ["sparse", "after"]
    for reading, member, _ in itertools.islice(members(tmp_path / "out.tar", MIB), 1):
        assert (member.size, list(stored_parts(member))) == (1 << 30, parts)
        content = packed_content(reading, member)
        for number, (_, length) in enumerate(parts):
            assert content.read(length) == bytes([number % 255 + 1]) * length
        assert content.read() == b""


def sparse_archive(folder: Path, text: bytes, size: int = 100) -> Path:
    """A file of GNU's format 1.0 with that map."""
    info = tarfile.TarInfo("f")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "f", "GNU.sparse.realsize": str(size)}
    info.size = len(text)
    with tarfile.open(folder / "hostile.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(text))
    return folder / "hostile.tar"


@pytest.mark.parametrize(
    "text",
    [
        b"1\n50\n60\n".ljust(512, b"\0"),
        b"2\n50\n10\n20\n10\n".ljust(512, b"\0"),
        b"1\n0\n",
        b"99999999999\n" * 50,
        b"x\n".ljust(512, b"\0"),
        b"1\n-5\n5\n".ljust(512, b"\0"),
        b"7" * 2048,
    ],
)
def test_maps_that_lie(tmp_path: Path, text: bytes):
    with pytest.raises(InvalidInput):
        list(members(sparse_archive(tmp_path, text), MIB))


def test_a_map_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tarballs, "_PARTS_MAX", 3)
    info = tarfile.TarInfo("f")
    info.size, info.sparse = 1 << 20, [(number << 13, 1) for number in range(9)]
    with (tmp_path / "many.tar").open("wb") as output, ArchiveWriter(output) as writing:
        writing.add(info, io.BytesIO(bytes(1 << 20)))
    with pytest.raises(InvalidInput, match="more than 3 parts"):
        list(members(tmp_path / "many.tar", MIB))


def test_old_maps_are_read_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """GNU's old format, as `tar --sparse --format=gnu` writes it."""
    import subprocess

    with (tmp_path / "f").open("wb") as content:
        for number in range(40):
            content.seek(number << 16)
            content.write(b"x")
        content.truncate(1 << 24)
    subprocess.run(["tar", "--sparse", "--format=gnu", "-C", str(tmp_path), "-cf", str(tmp_path / "old.tar"), "f"], check=True)
    ((_, member, _),) = list(members(tmp_path / "old.tar", MIB))
    assert (member.size, len(stored_parts(member))) == (1 << 24, 40)
    monkeypatch.setattr(tarballs, "_PARTS_MAX", 30)
    with pytest.raises(InvalidInput, match="more than 30 parts"):
        list(members(tmp_path / "old.tar", MIB))
