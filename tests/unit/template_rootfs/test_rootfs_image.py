"""The base image: what goes in, what is taken out, and that its file system is sound."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv.core.errors import InvalidInput
from agentenv.host.debian import DebianMirror, parse_source_stanzas
from agentenv.host.requirements import find_program
from agentenv.template import rootfs
from agentenv.template.rootfs import (
    BASE_PACKAGES,
    GIB,
    GuestFile,
    ensure_rootfs,
    guest_sources,
    installed_packages,
    make_image,
    placeholder_status,
)

MIRROR = DebianMirror("http://m.example/debian", "http://s.example/debian-security", "/etc/own.gpg")
needs_e2fsprogs = pytest.mark.skipif(
    find_program("mke2fs") is None or find_program("debugfs") is None or find_program("e2fsck") is None, reason="needs e2fsprogs"
)
STATUS = """\
Package: zlib1g
Status: install ok installed
Version: 1:1.2.13
Description: compression
 Version: not a field

Package: gone
Status: deinstall ok config-files
Version: 1

Package: bash
Status: install ok installed
Version: 5.2
"""


def test_installed_packages_of_a_status_file() -> None:
    assert installed_packages(STATUS) == ["bash=5.2", "zlib1g=1:1.2.13"]


def test_placeholders_count_as_installed() -> None:
    status = STATUS + "\n" + placeholder_status(["big=0+placeholder", "data=14.0+placeholder"])
    assert installed_packages(status) == ["bash=5.2", "big=0+placeholder", "data=14.0+placeholder", "zlib1g=1:1.2.13"]
    assert placeholder_status([]) == ""


def test_guest_sources_use_the_guests_own_keyring() -> None:
    found = parse_source_stanzas(guest_sources("bookworm", MIRROR))
    assert [(source.uri, source.suites) for source in found] == [
        ("http://m.example/debian", ("bookworm", "bookworm-updates")),
        ("http://s.example/debian-security", ("bookworm-security",)),
    ]
    assert {source.signed_by for source in found} == {"/usr/share/keyrings/debian-archive-keyring.gpg"}
    assert len(parse_source_stanzas(guest_sources("bookworm", DebianMirror("http://m.example/debian", "", "/k")))) == 1


@pytest.mark.parametrize("size_bytes", [0, GIB - 4096, GIB + 1, 4096 * GIB])
def test_odd_sizes_are_refused(tmp_path: Path, size_bytes: int) -> None:
    with pytest.raises(InvalidInput, match="root disk"):
        ensure_rootfs(tmp_path, size_bytes=size_bytes, mirror=MIRROR)


@pytest.mark.parametrize(("packages", "release"), [(["--bad"], "bookworm"), (["a b"], "bookworm"), ([], "book worm"), ([], "-t")])
def test_odd_names_are_refused(tmp_path: Path, packages: list[str], release: str) -> None:
    with pytest.raises(InvalidInput):
        ensure_rootfs(tmp_path, packages=packages, release=release, mirror=MIRROR)


@pytest.mark.parametrize("path", ["relative", "/", "/a//b", "/a/../b", "/a/."])
def test_odd_paths_of_files_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidInput, match="absolute path"):
        ensure_rootfs(tmp_path, files=[GuestFile(path, b"")], mirror=MIRROR)


def debugfs(image: Path, request: str) -> str:
    return subprocess.run([find_program("debugfs"), "-R", request, image], capture_output=True, check=True, timeout=60).stdout.decode()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (tree / "bin").symlink_to("usr/bin")
    (tree / "secret").write_text("x")
    (tree / "secret").chmod(0o600)
    return tree


@needs_e2fsprogs
def test_image_is_a_sound_sparse_ext4(tmp_path: Path, tree: Path) -> None:
    image = tmp_path / "root.ext4"
    make_image(tree, image, 2 * GIB, "identity")
    assert image.stat().st_size == 2 * GIB
    assert image.stat().st_blocks * 512 < 64 << 20
    subprocess.run([find_program("e2fsck"), "-f", "-n", image], check=True, capture_output=True, timeout=60)
    assert debugfs(image, "cat /etc/passwd") == "root:x:0:0::/root:/bin/sh\n"
    assert "Mode:  0600" in debugfs(image, "stat /secret")
    assert 'Fast link dest: "usr/bin"' in debugfs(image, "stat /bin")
    header = debugfs(image, "stats -h")
    assert re.search(r"^Filesystem volume name:\s+root$", header, re.MULTILINE)
    assert re.search(r"^Reserved block count:\s+0$", header, re.MULTILINE)
    assert debugfs(image, "stat <8>").count("Size: 33554432") == 1


@needs_e2fsprogs
def test_no_inode_table_is_left_for_the_guest_to_zero(tmp_path: Path, tree: Path) -> None:
    image = tmp_path / "root.ext4"
    make_image(tree, image, 2 * GIB, "identity")
    dumped = subprocess.run([find_program("dumpe2fs"), image], capture_output=True, check=True, timeout=60).stdout.decode()
    group_lines = [line for line in dumped.splitlines() if re.match(r"Group \d+: ", line)]
    assert len(group_lines) == 16
    assert all("ITABLE_ZEROED" in line for line in group_lines)


@needs_e2fsprogs
def test_ids_of_the_file_system_follow_from_the_identity(tmp_path: Path, tree: Path) -> None:
    def ids(name: str, identity: str) -> list[str]:
        make_image(tree, tmp_path / name, GIB, identity)
        return re.findall(
            r"^(?:Filesystem UUID|Directory Hash Seed|Filesystem created):\s+(.*)$", debugfs(tmp_path / name, "stats -h"), re.MULTILINE
        )

    one = ids("one", "a")
    assert len(one) == 3
    assert ids("two", "a") == one
    other = ids("three", "b")
    assert other[0] != one[0]
    assert other[1] != one[1] or other[2] != one[2]


@pytest.fixture
def fake_bootstrap(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """mmdebstrap's place is taken by a function that lays down what it would leave of interest; mke2fs is real."""
    calls: list[list[str]] = []
    real = rootfs.run_command

    def run(argv, **options) -> bytes:
        words = [str(word) for word in argv]
        calls.append(words)
        if words[0] == "apt-config":
            return b'Acquire::http::Proxy "http://proxy.example:3128";\nDir "/";\n'
        if words[0] != "mmdebstrap":
            return real(argv, **options)
        tree = Path(words[words.index("bookworm") + 1])
        for folder in (
            "etc/apt/apt.conf.d",
            "etc/sudoers.d",
            "etc/default",
            "var/lib/dpkg",
            "var/lib/apt/lists/partial",
            "var/log/apt",
            "tmp",
            "run",
        ):
            (tree / folder).mkdir(parents=True)
        (tree / "var/lib/dpkg/status").write_text(STATUS)
        (tree / "etc/hostname").write_text("the-host")
        (tree / "etc/resolv.conf").symlink_to("/run/resolv.conf")
        (tree / "etc/machine-id").write_text("0123")
        (tree / "etc/apt/sources.list").write_text("deb http://m.example/debian bookworm main\n")
        (tree / "etc/apt/apt.conf.d/99mmdebstrap").write_text('Acquire::http::Proxy "http://proxy.example:3128";\n')
        (tree / "var/lib/apt/lists/partial/x").write_text("x")
        (tree / "var/log/dpkg.log").write_text("x")
        return b""

    monkeypatch.setattr(rootfs, "run_command", run)
    return calls


@needs_e2fsprogs
def test_tree_is_cleaned_of_the_host_and_cached(tmp_path: Path, fake_bootstrap: list[list[str]]) -> None:
    made = ensure_rootfs(tmp_path, packages=["less"], size_bytes=GIB, mirror=MIRROR)
    assert made.packages == ("bash=5.2", "zlib1g=1:1.2.13")
    assert made.used_bytes < 64 << 20 < made.size_bytes == made.path.stat().st_size
    assert debugfs(made.path, "cat /etc/machine-id") == ""
    assert debugfs(made.path, "cat /etc/resolv.conf") == ""
    assert "NOPASSWD:ALL" in debugfs(made.path, "cat /etc/sudoers.d/user")
    assert "Mode:  0440" in debugfs(made.path, "stat /etc/sudoers.d/user")
    assert debugfs(made.path, "cat /etc/apt/sources.list.d/debian.sources") == guest_sources("bookworm", MIRROR)
    assert "hostname" not in debugfs(made.path, "ls /etc")
    assert "99mmdebstrap" not in debugfs(made.path, "ls /etc/apt/apt.conf.d")
    assert "partial" not in debugfs(made.path, "ls /var/lib/apt/lists")
    assert "dpkg.log" not in debugfs(made.path, "ls /var/log")
    assert sorted(path.name for path in made.path.parent.iterdir()) == ["manifest.json", "root.ext4"]
    count = len(fake_bootstrap)
    assert ensure_rootfs(tmp_path, packages=["less"], size_bytes=GIB, mirror=MIRROR) == made
    assert len(fake_bootstrap) == count
    assert ensure_rootfs(tmp_path, packages=["tree"], size_bytes=GIB, mirror=MIRROR).digest != made.digest


@needs_e2fsprogs
def test_mmdebstrap_gets_signed_sources_packages_and_the_user(tmp_path: Path, fake_bootstrap: list[list[str]]) -> None:
    ensure_rootfs(tmp_path, packages=["less"], size_bytes=GIB, mirror=MIRROR)
    (call,) = [words for words in fake_bootstrap if words[0] == "mmdebstrap"]
    include = next(word for word in call if word.startswith("--include=")).removeprefix("--include=").split(",")
    assert set(include) == {*BASE_PACKAGES, "less"}
    assert [word for word in call if word.startswith("deb ")] == [
        "deb [signed-by=/etc/own.gpg] http://m.example/debian bookworm main",
        "deb [signed-by=/etc/own.gpg] http://m.example/debian bookworm-updates main",
        "deb [signed-by=/etc/own.gpg] http://s.example/debian-security bookworm-security main",
    ]
    assert '--aptopt=Acquire::http::Proxy "http://proxy.example:3128";' in call
    assert not any("Dir " in word for word in call if word.startswith("--aptopt"))
    assert any("useradd --uid 1000" in word for word in call)


@needs_e2fsprogs
def test_own_files_and_commands_are_part_of_the_image_and_of_its_digest(tmp_path: Path, fake_bootstrap: list[list[str]]) -> None:
    def digest(files: tuple[GuestFile, ...] = (), commands: tuple[str, ...] = ()) -> str:
        return ensure_rootfs(tmp_path, files=files, commands=commands, size_bytes=GIB, mirror=MIRROR).digest

    file = GuestFile("/opt/a/b", b"x", 0o755)
    different = [(), (file,), (GuestFile("/opt/a/b", b"y", 0o755),), (GuestFile("/opt/a/b", b"x"),), (GuestFile("/opt/a/c", b"x", 0o755),)]
    digests = [digest(files) for files in different] + [digest((file,), ("true",)), digest((file,), ("true", "echo 'a b'"))]
    assert len(set(digests)) == len(digests)
    call = [words for words in fake_bootstrap if words[0] == "mmdebstrap"][-1]
    hooks = [word.removeprefix("--customize-hook=") for word in call if word.startswith("--customize-hook=")]
    assert "useradd" in hooks[0]
    assert hooks[1].startswith("cp -a ")
    assert hooks[2:] == ['chroot "$1" /bin/sh -ec true', """chroot "$1" /bin/sh -ec 'echo '"'"'a b'"'"''"""]


def test_staged_files_have_their_modes_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        rootfs._stage(tmp_path / "staged", [GuestFile("/opt/a/b", b"x", 0o755), GuestFile("/opt/c", b"y"), GuestFile("/d", b"", 0o600)])
    finally:
        os.umask(before)
    found = {str(path.relative_to(tmp_path / "staged")): path.stat().st_mode & 0o7777 for path in (tmp_path / "staged").rglob("*")}
    assert found == {"opt": 0o755, "opt/a": 0o755, "opt/a/b": 0o755, "opt/c": 0o644, "d": 0o600}
    assert (tmp_path / "staged/opt/a/b").read_bytes() == b"x"


def test_interrupted_build_leaves_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(argv, **options) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(rootfs, "run_command", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ensure_rootfs(tmp_path, size_bytes=GIB, mirror=MIRROR)
    assert [path.name for path in (tmp_path / "assets").iterdir() if path.suffix != ".lock"] == []
    shutil.rmtree(tmp_path / "assets")
