"""Extraction of vmlinux from bzImages built here, one for each compression, and the choice of the package."""

import bz2
import gzip
import json
import lzma
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from agentenv.core.errors import InvalidInput, NotFound, Unsupported
from agentenv.guest import kernel
from agentenv.guest.kernel import ensure_kernel, extract_vmlinux, kernel_release_of, local_kernel

VMLINUX = b"\x7fELF\x02\x01" + b"Linux version 6.12.1+test-cloud-amd64 (debian)\n" + bytes(range(256)) * 400


def bzimage(payload: bytes, *, setup_sectors: int = 3, offset: int = 40, protocol: int = 0x020F) -> bytes:
    header = bytearray(((setup_sectors or 4) + 1) * 512)
    header[0x1F1] = setup_sectors
    header[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", header, 0x206, protocol)
    struct.pack_into("<II", header, 0x248, offset, len(payload))
    return bytes(header) + b"\xcc" * offset + payload + b"tail of the image"


def with_size(packed: bytes, size_bytes: int = len(VMLINUX)) -> bytes:
    return packed + struct.pack("<I", size_bytes)


def tool(*argv: str) -> bytes:
    return subprocess.run(argv, input=VMLINUX, capture_output=True, check=True, timeout=20).stdout


@pytest.mark.parametrize("setup_sectors", [0, 3, 27])
def test_payload_is_found_after_the_setup_code(setup_sectors: int) -> None:
    assert extract_vmlinux(bzimage(gzip.compress(VMLINUX), setup_sectors=setup_sectors)) == VMLINUX


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(VMLINUX, id="plain"),
        pytest.param(gzip.compress(VMLINUX), id="gzip"),
        pytest.param(with_size(lzma.compress(VMLINUX, check=lzma.CHECK_CRC32)), id="xz"),
        pytest.param(with_size(lzma.compress(VMLINUX, format=lzma.FORMAT_ALONE)), id="lzma"),
        pytest.param(with_size(bz2.compress(VMLINUX)), id="bzip2"),
    ],
)
def test_compressions_of_the_standard_library(payload: bytes) -> None:
    assert extract_vmlinux(bzimage(payload)) == VMLINUX


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the zstd tool")
def test_zstd() -> None:
    assert extract_vmlinux(bzimage(with_size(tool("zstd", "-q", "-c")))) == VMLINUX


@pytest.mark.skipif(shutil.which("lz4") is None, reason="needs the lz4 tool")
def test_lz4_legacy() -> None:
    assert extract_vmlinux(bzimage(with_size(tool("lz4", "-q", "-l", "-c")))) == VMLINUX


def test_unknown_compression_is_named() -> None:
    with pytest.raises(Unsupported, match="894c5a4f"):
        extract_vmlinux(bzimage(with_size(bytes.fromhex("894c5a4f000d0a1a0a") + bytes(50))))


def test_wrong_size_is_refused() -> None:
    with pytest.raises(InvalidInput, match="should be 17 bytes"):
        extract_vmlinux(bzimage(with_size(bz2.compress(VMLINUX[:18]), 17)))


def test_absurd_size_is_refused_before_unpacking() -> None:
    with pytest.raises(InvalidInput, match="more than"):
        extract_vmlinux(bzimage(with_size(bz2.compress(VMLINUX), 1 << 31)))


@pytest.mark.parametrize(
    "payload", [gzip.compress(VMLINUX)[:-500], with_size(lzma.compress(VMLINUX)[:-500]), with_size(b"BZh9" + bytes(99))]
)
def test_damaged_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidInput):
        extract_vmlinux(bzimage(payload))


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(InvalidInput, match="HdrS"):
        extract_vmlinux(bytes(4096))
    with pytest.raises(InvalidInput, match="HdrS"):
        extract_vmlinux(b"")
    with pytest.raises(InvalidInput, match="cut short"):
        extract_vmlinux(bzimage(gzip.compress(VMLINUX))[:2200])
    with pytest.raises(Unsupported, match=r"2\.04"):
        extract_vmlinux(bzimage(gzip.compress(VMLINUX), protocol=0x0204))
    with pytest.raises(InvalidInput, match="ELF"):
        extract_vmlinux(bzimage(gzip.compress(b"no kernel" * 100)))


def test_release_is_read_from_the_image(tmp_path: Path) -> None:
    assert kernel_release_of(VMLINUX) == "6.12.1+test-cloud-amd64"
    with pytest.raises(InvalidInput):
        kernel_release_of(b"\x7fELF")
    (tmp_path / "vmlinux").write_bytes(VMLINUX)
    found = local_kernel(tmp_path / "vmlinux")
    assert (found.version, found.modules_tar, found.package) == ("6.12.1+test-cloud-amd64", None, "")
    (tmp_path / "vmlinuz").write_bytes(bzimage(VMLINUX))
    with pytest.raises(InvalidInput, match="not an uncompressed ELF"):
        local_kernel(tmp_path / "vmlinuz")
    with pytest.raises(InvalidInput, match="cannot read"):
        local_kernel(tmp_path / "none")


class FakeApt:
    """Stands for the private apt: one metapackage, one image package whose file is a ready-made tree."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.downloads = 0

    def update(self, progress, *, force=False) -> None:
        progress("fetch package lists", None, None)

    def show(self, package: str, suite: str) -> dict[str, str]:
        if package == "linux-image-cloud-amd64":
            return {"Version": "6.12.1-1~bpo12+1", "Depends": "linux-image-6.12.1+test-cloud-amd64 (= 6.12.1-1~bpo12+1)"}
        raise NotFound(f"{suite} has no package {package}")

    def download(self, packages, suite, *, closure, progress):
        assert packages == ["linux-image-6.12.1+test-cloud-amd64=6.12.1-1~bpo12+1"]
        assert not closure
        self.downloads += 1
        return [self.tree]

    def discard(self, debs) -> None:
        assert debs == [self.tree]


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApt:
    tree = tmp_path / "tree"
    modules = tree / "lib/modules/6.12.1+test-cloud-amd64/kernel"
    modules.mkdir(parents=True)
    (modules / "virtio_blk.ko").write_bytes(b"module")
    (tree / "boot").mkdir()
    (tree / "boot/vmlinuz-6.12.1+test-cloud-amd64").write_bytes(bzimage(gzip.compress(VMLINUX)))
    (tree / "boot/config-6.12.1+test-cloud-amd64").write_text("CONFIG_X=y\n")
    monkeypatch.setattr(kernel, "unpack", lambda debs, into: shutil.copytree(debs[0], into, dirs_exist_ok=True))
    return FakeApt(tree)


def test_kernel_is_taken_apart_once_and_then_found_without_apt(tmp_path: Path, apt: FakeApt) -> None:
    made = ensure_kernel(tmp_path / "cache", apt=apt)
    assert made.version == "6.12.1+test-cloud-amd64"
    assert made.package == "linux-image-6.12.1+test-cloud-amd64=6.12.1-1~bpo12+1"
    assert made.vmlinux.read_bytes() == VMLINUX
    assert made.modules_tar is not None
    listed = subprocess.run(["tar", "-tf", made.modules_tar], capture_output=True, check=True, timeout=20).stdout.decode().split()
    assert "lib/modules/6.12.1+test-cloud-amd64/kernel/virtio_blk.ko" in listed
    manifest = json.loads((made.vmlinux.parent / "manifest.json").read_text())
    assert set(manifest["files"]) == {"vmlinux", "config", "modules.tar"}

    class NoApt:
        def __getattr__(self, name: str):
            raise AssertionError("a cached kernel must not ask apt")

    assert ensure_kernel(tmp_path / "cache", apt=NoApt()) == made  # type: ignore[arg-type]
    assert ensure_kernel(tmp_path / "cache", apt=NoApt(), verify=True) == made  # type: ignore[arg-type]


@pytest.mark.parametrize("verify", [False, True])
def test_damaged_kernel_is_made_again(tmp_path: Path, apt: FakeApt, verify: bool) -> None:
    made = ensure_kernel(tmp_path / "cache", apt=apt)
    with open(made.vmlinux, "r+b") as image:
        image.seek(1000)
        image.write(b"damage")
    assert ensure_kernel(tmp_path / "cache", apt=apt, verify=verify).vmlinux.read_bytes() == VMLINUX
    assert apt.downloads == 2


def test_package_of_another_suite_is_another_kernel(tmp_path: Path, apt: FakeApt) -> None:
    ensure_kernel(tmp_path / "cache", apt=apt)
    with pytest.raises(NotFound):
        ensure_kernel(tmp_path / "cache", apt=apt, package="linux-image-none")
