"""COPY: which files of an uploaded archive go where, and which archives are refused."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from agentenv.core.errors import InvalidInput
from agentenv.template import copying, tarballs
from agentenv.template.copying import Owner, Source

MIB = 1 << 20
OWNER = Owner(7, 8)


def entry(name: str, content: bytes | None = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes | None]:
    info = tarfile.TarInfo(name)
    info.type = tarfile.REGTYPE if content is not None else tarfile.DIRTYPE
    info.size = len(content or b"")
    info.mode, info.mtime = 0o640, 1_700_000_000
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def make(path: Path, *entries: tuple[tarfile.TarInfo, bytes | None], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content) if content else None)
    return path


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, None]:
    return entry(name, None, type=kind, linkname=target)


TREE = (
    entry("app", None),
    entry("app/a.txt", b"A"),
    entry("app/sub", None),
    entry("app/sub/b.py", b"B"),
    link("app/l", "a.txt"),
    entry("other.txt", b"O"),
)


def copied(tmp_path: Path, entries: tuple, source: str, destination: str, is_folder: bool = False, owner: Owner = OWNER):
    archive = make(tmp_path / "in.tar.gz", *entries)
    parsed = Source.parse(source)
    layout = copying.lay_out(copying.survey(archive, parsed, MIB), parsed, destination, is_folder)
    copying.rewrite(archive, tmp_path / "out.tar", parsed, layout, owner, MIB)
    with tarfile.open(tmp_path / "out.tar") as out:
        return layout.folder, {info.name: info for info in out.getmembers()}


@pytest.mark.parametrize(
    ("source", "destination", "is_folder", "folder", "names"),
    [
        ("other.txt", "/srv/new.txt", False, "/srv", {"new.txt"}),
        ("other.txt", "/srv/", False, "/srv", {"other.txt"}),
        ("other.txt", "/srv", True, "/srv", {"other.txt"}),
        ("./other.txt", "/home/user/.", False, "/home/user", {"other.txt"}),
        ("app", "/srv/app", False, "/srv/app", {".", "a.txt", "sub", "sub/b.py", "l"}),
        ("app/", "/srv/", True, "/srv", {".", "a.txt", "sub", "sub/b.py", "l"}),
        ("app/sub/b.py", "/b.py", False, "/", {"b.py"}),
        ("app/*", "/srv", False, "/srv", {"a.txt", "l", ".", "b.py"}),
        ("*.txt", "/srv", False, "/", {"srv"}),  # one match: it becomes the destination
        ("*.txt", "/srv", True, "/srv", {"other.txt"}),
        (".", "/srv", False, "/srv", {"app", "app/a.txt", "app/sub", "app/sub/b.py", "app/l", "other.txt"}),
        ("app/l", "/srv/here", False, "/srv", {"here"}),
        ("app/**/*.py", "/srv", False, "/srv", {"sub/b.py"}),
    ],
)
def test_where_things_go(tmp_path: Path, source: str, destination: str, is_folder: bool, folder: str, names: set[str]):
    uploaded = {"*.txt": TREE[5:], "app/**/*.py": TREE[3:4]}  # clients put only what matched into the archive
    where, members = copied(tmp_path, uploaded.get(source, TREE), source, destination, is_folder)
    assert (where, set(members)) == (folder, names)


def test_several_matches_need_no_slash_and_folders_are_merged(tmp_path: Path):
    entries = (entry("x1", None), entry("x1/f", b"1"), entry("x2", b"2"), entry("x3", b"3"))
    folder, members = copied(tmp_path, entries, "x*", "/to")
    assert (folder, set(members)) == ("/to", {".", "f", "x2", "x3"})


def test_owner_mode_time_and_links(tmp_path: Path):
    entries = (*TREE[:4], link("app/l", "a.txt"), link("app/gone", "/nowhere"), link("app/hard", "app/a.txt", tarfile.LNKTYPE))
    _, members = copied(tmp_path, entries, "app", "/srv", owner=Owner(1000, 50, 0o755))
    assert {(m.uid, m.gid, m.uname) for m in members.values()} == {(1000, 50, "")}
    assert (members["a.txt"].mode, members["sub"].mode, members["a.txt"].mtime) == (0o755, 0o755, 1_700_000_000)
    assert (members["l"].issym(), members["l"].linkname, members["gone"].linkname) == (True, "a.txt", "/nowhere")
    assert (members["hard"].islnk(), members["hard"].linkname) == (True, "a.txt")


def test_without_a_mode_each_keeps_its_own(tmp_path: Path):
    _, members = copied(tmp_path, (entry("f", mode=0o4711),), "f", "/f")
    assert members["f"].mode == 0o4711


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_any_compression(tmp_path: Path, mode: str):
    archive = make(tmp_path / "a", entry("f", b"content"), mode=mode)
    assert copying.survey(archive, Source.parse("f"), MIB) == {("f",): False}


def test_names_that_are_long_or_no_utf8(tmp_path: Path):
    long = "/".join(["d" * 100] * 5) + "/" + "n" * 200
    odd = os.fsdecode(b"\xff\xfe'\n\"")
    _, members = copied(tmp_path, (entry(f"x/{long}"), entry(f"x/{odd}")), "x", "/srv")
    assert {long, odd} <= set(members)


@pytest.mark.parametrize(
    ("entries", "source", "said"),
    [
        (TREE, "nothing.txt", "no 'nothing.txt'"),
        (TREE, "../x", "outside"),
        ((entry("/etc/passwd"),), "x", "outside"),
        ((entry("a/../../x"),), "a", "outside"),
        ((entry("x", None, type=tarfile.CHRTYPE),), "x", "neither file"),
        ((entry("x", None, type=tarfile.FIFOTYPE),), "x", "neither file"),
        ((entry("x", b"1" * (MIB + 1)),), "x", "more than 1 MiB"),
        ((entry("unwanted", b"1" * (MIB + 1)), entry("x")), "x", "more than 1 MiB"),
        ((entry("elsewhere"), link("x", "elsewhere", tarfile.LNKTYPE)), "x", "hard link"),
    ],
)
def test_what_is_refused(tmp_path: Path, entries: tuple, source: str, said: str):
    with pytest.raises(InvalidInput, match=said):
        copied(tmp_path, entries, source, "/srv")


def test_too_many_entries_and_too_large_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tarballs, "ENTRIES_MAX", 3)
    with pytest.raises(InvalidInput, match="more than 3 files"):
        copied(tmp_path, tuple(entry(f"x/{n}") for n in range(4)), "x", "/srv")
    for name, fields in {"n" * (2 * MIB): {}, "x": {"pax_headers": {"comment": "c" * (2 * MIB)}}}.items():
        with pytest.raises(InvalidInput, match="a header of"):
            copied(tmp_path, (entry(name, **fields),), "x", "/srv")


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08garbage", b"\0" * 5000])
def test_what_is_no_archive(tmp_path: Path, content: bytes):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InvalidInput, match="COPY"):
        copying.survey(tmp_path / "a", Source.parse("x"), MIB)


def test_an_archive_that_ends_early(tmp_path: Path):
    whole = make(tmp_path / "a", entry("x", os.urandom(100_000))).read_bytes()
    (tmp_path / "a").write_bytes(whole[:50_000])
    source = Source.parse("x")
    with pytest.raises(InvalidInput, match="cannot be read"):
        copying.rewrite(tmp_path / "a", tmp_path / "out", source, copying.Layout("/"), Owner(0, 0), MIB)
