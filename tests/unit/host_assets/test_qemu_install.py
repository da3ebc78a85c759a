"""Which QEMU may run guests, and how the packaged one is started."""

import shutil
from pathlib import Path

import pytest

from agentenv.core.errors import HostNotReady, Internal
from agentenv.vmm import qemu_install
from agentenv.vmm.qemu_install import KNOWN_BAD, ensure_qemu, host_qemu, packaged_argv, parse_version, why_unfit


def test_version_texts() -> None:
    assert parse_version("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)\nCopyright") == (
        "10.0.2",
        "Debian 1:10.0.2+ds-2+deb13u1~bpo12+1",
    )
    assert parse_version("QEMU emulator version 9.2.50-dirty\n") == ("9.2.50", "")
    with pytest.raises(Internal):
        parse_version("bash: not found")


@pytest.mark.parametrize(
    ("version", "fit"),
    [("7.2.18", False), ("5.2.0", False), ("8.0.0", False), ("9.2.4", False), ("10.0.0", True), ("10.1.2", True), ("11.0.0", True)],
)
def test_version_table(version: str, fit: bool) -> None:
    assert (why_unfit(version) == "") is fit


def test_table_rows_are_ranges_with_a_reason() -> None:
    for first, last, reason in KNOWN_BAD:
        assert first <= last
        assert reason


def fake_host(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, machines: str = "microvm    microvm (i386)") -> Path:
    program = folder / "qemu-system-x86_64"
    answers = f'--version) echo "QEMU emulator version {version} (Own)";; *) echo "Supported machines are:"; echo "{machines}";;'
    program.write_text(f"#!/bin/sh\ncase $1 in {answers} esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return program


def test_fit_host_qemu_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_host(tmp_path, monkeypatch, "10.0.2")
    found = ensure_qemu(tmp_path / "cache")
    assert (found.argv, found.version, found.build, found.source) == ((str(program),), "10.0.2", "Own", "host")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("version", "machines", "reason"), [("7.2.0", "microvm  x", "cmpxchg16b"), ("10.0.0", "pc  x", "no machine type microvm")]
)
def test_unfit_host_qemu_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, machines: str, reason: str
) -> None:
    fake_host(tmp_path, monkeypatch, version, machines)
    with pytest.raises(HostNotReady, match=reason) as caught:
        ensure_qemu(tmp_path / "cache", prefer="host")
    assert caught.value.hint


def test_named_program_is_used_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_host(tmp_path, monkeypatch, "10.1.0").rename(tmp_path / "own-qemu")
    assert ensure_qemu(tmp_path / "cache", program=str(program)).argv == (str(program),)
    with pytest.raises(HostNotReady, match="has no /none/qemu"):
        ensure_qemu(tmp_path / "cache", program="/none/qemu")


def test_missing_host_qemu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostNotReady, match="has no qemu-system-x86_64"):
        host_qemu()


class FakeApt:
    """Hands out one ready-made tree in place of packages."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.downloads = 0

    def update(self, progress) -> None:
        progress("fetch package lists", None, None)

    def show(self, package: str, suite: str) -> dict[str, str]:
        return {"Version": "1:10.0.2+ds-2~bpo12+1"}

    def download(self, packages, suite, *, progress):
        assert packages == ["qemu-system-x86=1:10.0.2+ds-2~bpo12+1"]
        self.downloads += 1
        return [self.tree]

    def discard(self, debs) -> None:
        assert debs == [self.tree]


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApt:
    """A tree like that of the packages: the loader is a script that answers for the program and lists two libraries."""
    tree = tmp_path / "tree"
    for folder in (
        "usr/bin",
        "lib/x86_64-linux-gnu",
        "usr/lib/x86_64-linux-gnu",
        "usr/share/qemu",
        "usr/share/seabios",
        "usr/lib/ipxe/qemu",
    ):
        (tree / folder).mkdir(parents=True)
    loader = tree / "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
    loader.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*--list*) echo "  linux-vdso.so.1 (0x0)"; echo "  libz.so.1 => /any/libz.so.1 (0x1)";'
        ' echo "  libglib-2.0.so.0 => /any/libglib-2.0.so.0 (0x2)";;\n'
        '*--version*) echo "QEMU emulator version 10.0.2 (Packaged)";;\n'
        '*) echo "microvm  microvm (i386)";;\n'
        "esac\n"
    )
    loader.chmod(0o755)
    (tree / "lib/x86_64-linux-gnu/libz.so.1.2.13").write_bytes(b"z")
    (tree / "lib/x86_64-linux-gnu/libz.so.1").symlink_to("libz.so.1.2.13")
    (tree / "lib/x86_64-linux-gnu/libgcc_s.so.1").write_bytes(b"gcc")
    (tree / "usr/lib/x86_64-linux-gnu/libglib-2.0.so.0").write_bytes(b"glib")
    (tree / "usr/lib/x86_64-linux-gnu/libunused.so.1").write_bytes(b"unused")
    (tree / "usr/bin/qemu-system-x86_64").write_bytes(b"program")
    for name in qemu_install.FIRMWARE:
        (tree / "usr/share/qemu" / name).write_bytes(name.encode())
    (tree / "usr/share/qemu/bios-microvm.bin").unlink()
    (tree / "usr/share/seabios/bios-microvm.bin").write_bytes(b"seabios")
    (tree / "usr/share/qemu/bios-256k.bin").unlink()
    (tree / "usr/share/qemu/bios-256k.bin").symlink_to("/usr/share/seabios/bios-microvm.bin")
    (tree / "usr/share/qemu/u-boot.e500").write_bytes(b"other firmware")

    def copy(debs, into: Path, progress) -> None:
        shutil.copytree(debs[0], into, symlinks=True, dirs_exist_ok=True)

    monkeypatch.setattr(qemu_install, "unpack", copy)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return FakeApt(tree)


def test_package_is_trimmed_and_runs_with_its_own_loader(tmp_path: Path, apt: FakeApt) -> None:
    found = ensure_qemu(tmp_path / "cache", prefer="package", apt=apt)  # type: ignore[arg-type]
    root = Path(found.argv[0]).parent.parent
    assert root.name == "qemu-1-10.0.2+ds-2-bpo12+1"
    assert (found.version, found.build, found.source) == ("10.0.2", "Packaged", "package")
    assert found.argv == packaged_argv(root)
    assert found.argv[1:4] == ("--library-path", str(root / "lib"), "--inhibit-cache")
    libraries = {path.name: path for path in (root / "lib").iterdir()}
    assert set(libraries) == {"ld-linux-x86-64.so.2", "libz.so.1", "libglib-2.0.so.0", "libgcc_s.so.1"}
    assert libraries["libz.so.1"].read_bytes() == b"z"
    assert not any(path.is_symlink() for path in root.rglob("*"))
    assert {path.name for path in (root / "share").iterdir()} == set(qemu_install.FIRMWARE)
    assert (root / "share/bios-256k.bin").read_bytes() == b"seabios"
    assert ensure_qemu(tmp_path / "cache", prefer="package", apt=apt) == found  # type: ignore[arg-type]
    assert apt.downloads == 1


def test_package_that_lacks_a_library_is_refused_and_leaves_nothing(tmp_path: Path, apt: FakeApt) -> None:
    (apt.tree / "usr/lib/x86_64-linux-gnu/libglib-2.0.so.0").unlink()
    with pytest.raises(Internal, match="libglib"):
        ensure_qemu(tmp_path / "cache", prefer="package", apt=apt)  # type: ignore[arg-type]
    assert not any(path.name.startswith("qemu-") for path in (tmp_path / "cache/assets").iterdir())
