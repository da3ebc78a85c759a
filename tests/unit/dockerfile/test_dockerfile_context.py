"""What of a context is uploaded: ignore files, sources with and without wildcards, links, and the hash of it all."""

from __future__ import annotations

import io
import os
import socket
import stat
import tarfile
from pathlib import Path

import pytest

from agentenv.core.errors import InvalidInput, NotFound
from agentenv.template.dockerfile.context import BuildContext, hash_of, write_archive
from agentenv.template.dockerfile.needs import Need
from agentenv.template.dockerfile.patterns import parse_source
from agentenv.template.tarballs import stored_parts

TREE = (
    "a.txt",
    "b.txt",
    ".hidden",
    "app/main.py",
    "app/app.log",
    "app/sub/x.log",
    "app/sub/keep.log",
    "docs/README.md",
    "docs/README-no.md",
    "we ird/é",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in TREE:
        path = tmp_path / "context" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "context"


def names(root: Path, *sources: str, ignore: str = "", excludes: tuple[str, ...] = ()) -> list[str]:
    entries = BuildContext(root, ignore.splitlines()).entries(Need(1, sources, excludes))
    return [entry.name for entry in entries if not entry.path.is_dir() or entry.path.is_symlink()]


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        (("a.txt",), ["a.txt"]),
        (("a.txt", "a.txt", "*.txt"), ["a.txt", "b.txt"]),
        ((".",), sorted(TREE, key=lambda name: name.split("/"))),
        (("app",), ["app/app.log", "app/main.py", "app/sub/keep.log", "app/sub/x.log"]),
        (("app/*",), ["app/app.log", "app/main.py", "app/sub/keep.log", "app/sub/x.log"]),
        (("*/README*.md",), ["docs/README-no.md", "docs/README.md"]),
        (("*h*",), [".hidden"]),
        (("?.txt",), ["a.txt", "b.txt"]),
        (("[b-z].txt",), ["b.txt"]),
        (("[^b].txt",), ["a.txt"]),
        ((r"\a.txt",), ["a.txt"]),
        (("we ird/é",), ["we ird/é"]),
        (("none*", "a.txt"), ["a.txt"]),
        (("none*",), []),
    ],
)
def test_sources(tree: Path, sources: tuple[str, ...], found: list[str]):
    assert names(tree, *sources) == found


IGNORED = [
    ("app", ".", ["app/"]),
    ("/app/", ".", ["app/"]),
    ("*.log", ".", []),
    ("**/*.log", ".", [".log"]),
    ("*/*.log", ".", ["app.log"]),
    ("app/sub", ".", ["app/sub/"]),
    ("app\n!app/main.py", ".", ["app/app.log", "app/sub/"]),
    ("app\n!app/sub/keep.log", ".", ["app/main.py", "app/app.log", "x.log"]),
    ("*\n!docs", ".", ["a.txt", "b.txt", ".hidden", "app/", "we ird"]),
    ("**\n!docs/*.md\ndocs/README-no.md", ".", ["a.txt", "b.txt", ".hidden", "app/", "we ird", "README-no"]),
    ("*.md\n!README.md", "docs", []),
    ("docs/*.md\n!docs/README.md", "docs", ["README-no"]),
    ("!docs/README.md\ndocs/*.md\n!docs/README-no.md", "docs", ["README.md"]),
    ("# app\n\n  a.txt  \n./b.txt", ".", ["a.txt", "b.txt"]),
    ("?.txt", ".", ["a.txt", "b.txt"]),
    (r"\#x", ".", []),
    (".*", ".", [".hidden"]),
    ("app/../a.txt", ".", ["a.txt"]),
    ("we ird", ".", ["we ird"]),
]


@pytest.mark.parametrize(("ignore", "source", "gone"), IGNORED, ids=[repr(case[0]) for case in IGNORED])
def test_ignore_files(tree: Path, ignore: str, source: str, gone: list[str]):
    everything = names(tree, source)
    expected = [name for name in everything if not any(part in name for part in gone)]
    assert names(tree, source, ignore=ignore) == expected
    assert len(expected) < len(everything) or not gone


def test_what_is_ignored_cannot_be_copied_and_the_error_says_why(tree: Path):
    for source in ("a.txt", "app"):
        with pytest.raises(NotFound, match="left out by the ignore file"):
            names(tree, source, ignore="a.txt\napp")
    with pytest.raises(NotFound, match="the context has no 'none'"):
        names(tree, "none")
    with pytest.raises(InvalidInput, match="ignore pattern"):
        names(tree, "a.txt", ignore="[")
    assert names(tree, "*.txt", ignore="a.txt") == ["b.txt"]


def test_excludes_are_below_their_source(tree: Path):
    assert names(tree, "app", excludes=("*.log",)) == ["app/main.py", "app/sub/keep.log", "app/sub/x.log"]
    assert names(tree, "app", excludes=("**/*.log",)) == ["app/main.py"]
    assert names(tree, ".", excludes=("app", "*.txt", "docs", "we ird")) == [".hidden"]


def test_which_ignore_file_counts(tree: Path):
    (tree / ".dockerignore").write_text("\ufeffa.txt\n")
    (tree / "Dockerfile").write_text("")
    need = Need(1, ("*.txt",), ())
    assert [e.name for e in BuildContext.open(tree, tree / "Dockerfile").entries(need)] == ["b.txt"]
    (tree / "Dockerfile.dockerignore").write_text("b.txt\n")
    assert [e.name for e in BuildContext.open(tree, tree / "Dockerfile").entries(need)] == ["a.txt"]
    assert [e.name for e in BuildContext.open(tree, tree / "Other").entries(need)] == ["b.txt"]
    assert next(e.name for e in BuildContext.open(tree / "app", None).entries(Need(1, (".",), ()))) == "."


def test_links(tree: Path):
    (tree / "to-file").symlink_to("app/main.py")
    (tree / "to-folder").symlink_to("app/sub")
    (tree / "app" / "inside").symlink_to("../a.txt")
    (tree / "absolute").symlink_to("/b.txt")
    (tree / "outside").symlink_to("../../../../etc/passwd")
    (tree / "circle").symlink_to("circle")
    (tree / "dangling").symlink_to("nothing")
    context = BuildContext(tree, [])

    def found(*sources: str) -> list[tuple[str, str]]:
        return [
            (e.name, e.path.name if not e.path.is_symlink() else f"-> {e.path.readlink()}") for e in context.entries(Need(1, sources, ()))
        ]

    assert found("to-file") == [("to-file", "main.py")]
    assert found("absolute") == [("absolute", "b.txt")]
    assert found("to-folder/x.log") == [("to-folder/x.log", "x.log")]
    assert [name for name, _ in found("to-folder")] == ["to-folder", "to-folder/keep.log", "to-folder/x.log"]
    assert ("app/inside", "-> ../a.txt") in found("app")
    for source in ("outside", "circle", "dangling"):
        with pytest.raises(NotFound):
            found(source)


def archive(root: Path, *sources: str) -> tuple[str, list[tarfile.TarInfo]]:
    entries = BuildContext(root, []).entries(Need(1, sources, ()))
    output = io.BytesIO()
    write_archive(entries, output)
    output.seek(0)
    with tarfile.open(fileobj=output) as made:
        return hash_of(entries), made.getmembers()


def test_the_archive_has_what_is_there_and_its_hash_says_so(tree: Path):
    (tree / "app" / "link").symlink_to("main.py")
    first, members = archive(tree, "app")
    assert [m.name for m in members] == ["app", "app/app.log", "app/link", "app/main.py", "app/sub", "app/sub/keep.log", "app/sub/x.log"]
    assert {(m.uid, m.gid, m.uname) for m in members} == {(0, 0, "")}
    os.utime(tree / "app" / "main.py", (1, 1))
    assert archive(tree, "app")[0] == first
    changes = [
        lambda: (tree / "app" / "main.py").write_text("other"),
        lambda: (tree / "app" / "main.py").chmod(0o755),
        lambda: (tree / "app" / "new").mkdir(),
        lambda: ((tree / "app" / "link").unlink(), (tree / "app" / "link").symlink_to("app.log")),
        lambda: (tree / "app" / "app.log").rename(tree / "app" / "b.log"),
    ]
    seen = {first}
    for change in changes:
        change()
        seen.add(archive(tree, "app")[0])
    assert len(seen) == len(changes) + 1


def test_whatever_a_file_has_is_sent(tree: Path):
    app = tree / "app"
    os.mkfifo(app / "pipe")
    os.mknod(app / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    os.link(app / "main.py", app / "zz-second")
    os.utime(app / "app.log", ns=(0, -1_500_000_000))
    os.setxattr(app / "main.py", "user.lines", b"one\n=two\0\xff")
    with (app / "sparse").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"middle")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(app / "socket"))
        first, members = archive(tree, "app")
        found = {member.name.removeprefix("app/"): member for member in members}
        assert "socket" not in found
        with pytest.raises(InvalidInput, match="is a socket"):
            archive(tree, "app/socket")
    assert (found["pipe"].type, found["null"].type) == (tarfile.FIFOTYPE, tarfile.CHRTYPE)
    assert (found["null"].devmajor, found["null"].devminor) == (1, 3)
    assert (found["zz-second"].type, found["zz-second"].linkname) == (tarfile.LNKTYPE, "app/main.py")
    assert found["app.log"].pax_headers["mtime"] == "-1.500000000"
    value = found["main.py"].pax_headers["SCHILY.xattr.user.lines"]
    assert value.encode(errors="surrogateescape") == b"one\n=two\0\xff"
    assert found["sparse"].size == 1 << 30
    assert sum(length for _, length in stored_parts(found["sparse"])) < 1 << 20

    seen = {first}
    changes = [
        lambda: os.setxattr(app / "main.py", "user.lines", b"two"),
        lambda: os.removexattr(app / "main.py", "user.lines"),
        lambda: ((app / "zz-second").unlink(), (app / "zz-second").write_bytes((app / "main.py").read_bytes())),
        lambda: ((app / "null").unlink(), os.mknod(app / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 5))),
    ]
    for change in changes:
        change()
        seen.add(archive(tree, "app")[0])
    assert len(seen) == len(changes) + 1


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        (("app/sub/x.log",), ["app", "app/sub", "app/sub/x.log"]),
        (("**/x.log",), ["app", "app/sub", "app/sub/x.log"]),
        (("app/**/*.log",), ["app", "app/app.log", "app/sub", "app/sub/keep.log", "app/sub/x.log"]),
        (("app/./sub/keep.log",), ["app", "app/sub", "app/sub/keep.log"]),
        (("**/none",), []),
    ],
)
def test_the_folders_above_go_with_parents(tree: Path, sources: tuple[str, ...], found: list[str]):
    entries = BuildContext(tree, []).entries(Need(1, sources, parents=True))
    assert [entry.name for entry in entries] == found


def test_deep_patterns():
    source = parse_source("a/**/b*/./c", parents=True)
    assert (source.pivot, source.deep, source.above()) == (3, 1, "a")
    for text in ("a/b/c", "a/x/y/bb/c"):
        assert source.match(tuple(text.split("/"))) == (tuple(text.split("/")), ())
    assert source.match(("a", "b", "c", "d")) == (("a", "b", "c"), ("d",))
    for text in ("a/c", "a/x/c", "b/b/c", "a"):
        assert source.match(tuple(text.split("/"))) is None
    assert parse_source("a/**/b").deep is None, "without --parents ** is as *"


@pytest.mark.parametrize("text", ["[", "[]", "a[b", "[a-", "[b-a]", "[-a]", "x\\", "[^]", "[\\"])
def test_no_patterns(text: str):
    with pytest.raises(InvalidInput, match="no pattern"):
        parse_source(text)


def test_matches_and_what_is_below_them():
    source = parse_source("a/*.d")
    assert source.match(("a", "x.d")) == (("a", "x.d"), ())
    assert source.match(("a", "x.d", "y", "z")) == (("a", "x.d"), ("y", "z"))
    assert source.match(("a",)) is None
    assert source.match(("b", "x.d")) is None
    assert parse_source(".").match(("a", "b")) == ((), ("a", "b"))
