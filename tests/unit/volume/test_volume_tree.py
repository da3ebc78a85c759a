"""The tree of a volume: what callers can do in it, and what hostile content cannot do to the machine."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core.errors import Conflict, InvalidInput, NotFound
from agentenv.volume import tree as tree_module
from agentenv.volume.tree import Attributes, Tree

OUTSIDE = "this is the host's"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "host.txt").write_text(OUTSIDE)
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "file").write_text(OUTSIDE)
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


@pytest.fixture
def tree(root: Path) -> Tree:
    return Tree(root)


def write(tree: Tree, path: str, data: bytes = b"x", *, overwrite: bool = True, parents: bool = False, **own: int):
    upload = tree.upload(path, Attributes(**own), overwrite, parents)
    try:
        upload.write(data)
        return upload.commit()
    finally:
        upload.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(tree: Tree, path: str) -> bytes:
    fd, size_bytes = tree.open_file(path)
    try:
        return os.pread(fd, size_bytes + 1, 0)
    finally:
        os.close(fd)


# -- ordinary use


def test_a_file_is_written_read_and_described(tree: Tree, root: Path):
    entry = write(tree, "/a.txt", b"hello")
    assert (entry.path, entry.kind, entry.size_bytes, entry.mode) == ("/a.txt", "file", 5, 0o644)
    assert (entry.uid, entry.gid) == (1000, 1000)
    assert read(tree, "a.txt") == b"hello"
    assert replace(tree.stat("/a.txt"), accessed_ms=0) == replace(entry, accessed_ms=0)
    assert names(root) == ["a.txt"]


@pytest.mark.parametrize("path", ["/a", "a", "//a", "/./a", "/x/../a", "/../../a", "/a/"])
def test_spellings_of_one_path(tree: Tree, path: str):
    write(tree, "/a", b"1")
    assert tree.stat(path).path == "/a"


@pytest.mark.parametrize(
    "name", ["a b", "ü日本", "%2e%2e", 'q"uote', "back\\slash", "-rf", ".hidden", "new\nline", "n" * 255, "\udcff\udc80"]
)
def test_odd_names_round_trip(tree: Tree, name: str):
    write(tree, f"/{name}", b"odd")
    assert read(tree, f"/{name}") == b"odd"
    assert [entry.path for entry in tree.entries("/", 1)] == [f"/{name}"]
    tree.remove(f"/{name}")
    assert tree.entries("/", 1) == []


@pytest.mark.parametrize("path", ["", "a\0b", "/" + "n" * 256, "/" + "d/" * 2100])
def test_impossible_paths(tree: Tree, path: str):
    with pytest.raises(InvalidInput):
        tree.stat(path)


def test_overwriting_follows_the_rule(tree: Tree):
    write(tree, "/a", b"old", mode=0o600, uid=5, gid=6)
    with pytest.raises(Conflict):
        write(tree, "/a", b"new", overwrite=False)
    assert read(tree, "/a") == b"old"
    entry = write(tree, "/a", b"new")
    assert (read(tree, "/a"), entry.mode, entry.uid) == (b"new", 0o644, 1000)


def test_an_upload_that_ends_early_changes_nothing(tree: Tree, root: Path):
    write(tree, "/a", b"old")
    for path in ("/a", "/b"):
        upload = tree.upload(path, Attributes(), True, False)
        upload.write(b"half of")
        upload.close()
    assert (read(tree, "/a"), names(root)) == (b"old", ["a"])


def test_missing_parents(tree: Tree):
    with pytest.raises(NotFound, match="'/d/e' not found"):
        write(tree, "/d/e/f")
    write(tree, "/d/e/f", parents=True)
    assert (tree.stat("/d/e").kind, tree.stat("/d/e").mode) == ("directory", 0o755)
    with pytest.raises(NotFound):
        write(tree, "/d/e/f/g")  # a file is no parent


def test_folders(tree: Tree):
    entry = tree.make_folder("/d", Attributes(7, 8, 0o2770), parents=False)
    assert (entry.kind, entry.uid, entry.gid, entry.mode) == ("directory", 7, 8, 0o2770)
    with pytest.raises(Conflict):
        tree.make_folder("/d", Attributes(), parents=False)
    assert tree.make_folder("/d", Attributes(), parents=True).uid == 7
    with pytest.raises(NotFound):
        tree.make_folder("/x/y", Attributes(), parents=False)
    tree.make_folder("/x/y", Attributes(), parents=True)
    write(tree, "/f")
    with pytest.raises(Conflict):
        tree.make_folder("/f", Attributes(), parents=True)
    with pytest.raises(Conflict):
        tree.make_folder("/", Attributes(), parents=False)
    assert tree.make_folder("/", Attributes(), parents=True).path == "/"


def test_listing_goes_as_deep_as_asked(tree: Tree):
    for path in ("/b/c/d", "/a", "/b/a"):
        write(tree, path, parents=True)
    paths = {depth: [entry.path for entry in tree.entries("/", depth)] for depth in (1, 2, 3)}
    assert paths == {1: ["/a", "/b"], 2: ["/a", "/b", "/b/a", "/b/c"], 3: ["/a", "/b", "/b/a", "/b/c", "/b/c/d"]}
    assert [entry.path for entry in tree.entries("/b", 1)] == ["/b/a", "/b/c"]
    with pytest.raises(NotFound):
        tree.entries("/a", 1)


def test_listing_has_a_limit(tree: Tree, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree_module, "LISTED_MAX", 3)
    for number in range(3):
        write(tree, f"/{number}")
    assert len(tree.entries("/", 1)) == 3
    write(tree, "/one more")
    with pytest.raises(InvalidInput, match="more than 3 entries"):
        tree.entries("/", 1)


def test_attributes_change(tree: Tree):
    write(tree, "/a")
    entry = tree.update("/a", Attributes(mode=0o4755, uid=0))
    assert (entry.mode, entry.uid, entry.gid) == (0o4755, 0, 1000)
    assert tree.update("/a", Attributes()).mode == 0o4755
    with pytest.raises(NotFound):
        tree.update("/b", Attributes(mode=0o600))


@pytest.mark.parametrize(("own", "named"), [({"uid": -1}, "uid"), ({"gid": 2**32 - 1}, "gid"), ({"mode": 0o10000}, "mode")])
def test_impossible_attributes(own: dict[str, int], named: str):
    with pytest.raises(InvalidInput, match=named):
        Attributes(**own).check()


def test_removal(tree: Tree):
    write(tree, "/d/e", parents=True)
    write(tree, "/f")
    tree.remove("/f")
    tree.remove("/d")
    assert tree.entries("/", 9) == []
    for path, error in (("/d", NotFound), ("/", InvalidInput)):
        with pytest.raises(error):
            tree.remove(path)


def test_a_deleted_volume_says_so(tree: Tree, root: Path):
    root.rmdir()
    with pytest.raises(NotFound, match="deleted"):
        tree.stat("/")


# -- hostile content


LINKS = {
    "absolute": lambda root: str(root.parent),
    "upwards": lambda root: "..",
    "far upwards": lambda root: "../" * 30 + str(root.parent).lstrip("/"),
    "by way of /proc": lambda root: "/proc/self/root" + str(root.parent),
    "in two steps": lambda root: "step/../..",
}


@pytest.fixture(params=LINKS)
def way_out(request: pytest.FixtureRequest, root: Path) -> str:
    """A link in the tree that, followed as any program does, leads to the folder above it."""
    (root / "step").mkdir()
    (root / "out").symlink_to(LINKS[request.param](root))
    assert (root / "out" / "host.txt").read_text() == OUTSIDE
    return "/out"


def test_no_link_leads_out(tree: Tree, way_out: str):
    assert tree.stat(way_out).kind == "symlink"
    for attempt in (
        lambda: tree.stat(f"{way_out}/host.txt"),
        lambda: read(tree, f"{way_out}/host.txt"),
        lambda: tree.entries(f"{way_out}/host", 1),
        lambda: tree.update(f"{way_out}/host.txt", Attributes(mode=0o777)),
        lambda: tree.remove(f"{way_out}/host.txt"),
        lambda: tree.remove(f"{way_out}/host"),
        lambda: write(tree, f"{way_out}/host/file"),
        lambda: tree.make_folder(f"{way_out}/host/new", Attributes(), parents=False),
    ):
        with pytest.raises((NotFound, InvalidInput)):
            attempt()


def test_nothing_outside_changes(tree: Tree, root: Path, way_out: str):
    before = _outside(root)
    for make in (
        lambda: write(tree, f"{way_out}/host/evil", parents=True),
        lambda: tree.make_folder(f"{way_out}/evil", Attributes(), True),
    ):
        with contextlib.suppress(NotFound, InvalidInput, Conflict):
            make()
    tree.entries("/", 9)
    tree.remove(way_out)
    assert _outside(root) == before


def _outside(root: Path) -> list[tuple[str, int, int]]:
    found = [path for path in root.parent.rglob("*") if root not in path.parents]
    return sorted((str(path), path.lstat().st_mode, path.lstat().st_size) for path in found)


def test_a_link_to_a_file_outside_reads_nothing(tree: Tree, root: Path):
    (root / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(NotFound):
        read(tree, "/passwd")
    write(tree, "/passwd", b"mine")  # replaces the link
    assert (root / "passwd").read_bytes() == b"mine"
    assert not (root / "passwd").is_symlink()


def test_absolute_links_mean_the_volume(tree: Tree, root: Path):
    write(tree, "/data/a", b"inside", parents=True)
    (root / "shortcut").symlink_to("/data")
    (root / "file").symlink_to("/data/a")
    assert read(tree, "/shortcut/a") == read(tree, "/file") == b"inside"
    assert tree.stat("/file").target == "/data/a"
    tree.remove("/shortcut")
    assert read(tree, "/data/a") == b"inside"


def test_links_in_a_removed_folder_are_not_followed(tree: Tree, root: Path):
    (root / "d").mkdir()
    (root / "d" / "up").symlink_to(root.parent / "host")
    tree.remove("/d")
    assert (root.parent / "host" / "file").read_text() == OUTSIDE


def test_owner_of_a_link_is_its_own(tree: Tree, root: Path):
    target = root.parent / "host.txt"
    before = target.stat().st_uid
    (root / "l").symlink_to(target)
    assert tree.update("/l", Attributes(uid=77)).uid == 77
    assert target.stat().st_uid == before
    with pytest.raises(InvalidInput, match="symbolic link"):
        tree.update("/l", Attributes(mode=0o777))


def test_special_files_are_not_opened(tree: Tree, root: Path):
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
    names = ["fifo", "socket"]
    if os.geteuid() == 0:
        os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        names.append("null")
    for name in names:
        assert tree.stat(f"/{name}").kind == "unknown"
        with pytest.raises(InvalidInput, match="no regular file"):
            read(tree, f"/{name}")
        write(tree, f"/{name}", b"now a file")
        assert read(tree, f"/{name}") == b"now a file"


def test_a_circle_of_links_ends(tree: Tree, root: Path):
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(InvalidInput):
        read(tree, "/a/x")


def test_a_folder_swapped_for_a_link_meanwhile(tree: Tree, root: Path):
    """A guest exchanges a folder and a link outwards as fast as it can; every write lands inside or fails."""
    (root / "d").mkdir()
    (root / "link").symlink_to(root.parent / "host")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for old, new in (("d", "t"), ("link", "d"), ("d", "link"), ("t", "d")):
                (root / old).rename(root / new)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(500):
            with contextlib.suppress(NotFound, InvalidInput):
                write(tree, "/d/file", b"guest")
                tree.update("/d/file", Attributes(mode=0o777))
                tree.remove("/d/file")
    finally:
        stop.set()
        swapper.join()
    assert names(root.parent / "host") == ["file"]
    assert (root.parent / "host" / "file").read_text() == OUTSIDE
