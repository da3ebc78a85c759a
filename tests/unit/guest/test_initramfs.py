"""Which modules go into the initramfs, in which order, and what its files are."""

import gzip
import io
import lzma
import struct
import tarfile
from pathlib import Path

import pytest

from agentenv.core.errors import InvalidInput, NotFound
from agentenv.guest.cpio import read_cpio
from agentenv.guest.initramfs import (
    decompress_module,
    elf_section,
    ensure_initramfs,
    load_order,
    module_depends,
    pack,
    select_modules,
)
from agentenv.guest.kernel import Kernel


def elf(sections: dict[str, bytes], *, interpreter: bool = False) -> bytes:
    """A little ELF file: header, optional PT_INTERP header, the sections, their names, the section table."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    body = bytearray(64 + (56 if interpreter else 0))
    table = [struct.pack("<IIQQQQ", 0, 0, 0, 0, 0, 0) + bytes(24)]
    for name, content in {**sections, ".shstrtab": names}.items():
        table.append(struct.pack("<IIQQQQ", names.index(name.encode() + b"\0"), 1, 0, 0, len(body), len(content)) + bytes(24))
        body += content
    table_at, count = len(body), len(table)
    header = (b"\x7fELF", 2, 1, 1, 0, 1, 62, 1, 0, 64, table_at, 0, 64, 56, int(interpreter), 64, count, count - 1)
    struct.pack_into("<4sBBBB8xHHIQQQIHHHHHH", body, 0, *header)
    if interpreter:
        struct.pack_into("<I", body, 64, 3)
    return bytes(body) + b"".join(table)


def module(*depends: str) -> bytes:
    return elf({".text": b"\x90" * 33, ".modinfo": b"license=GPL\0depends=" + ",".join(depends).encode() + b"\0name=x\0"})


STATIC_INIT = elf({".text": b"code"})


def kernel_with(folder: Path, modules: dict[str, bytes], builtin: str = "kernel/fs/ext4/ext4.ko\n") -> Kernel:
    with tarfile.open(folder / "modules.tar", "w") as tar:
        for name, content in {**modules, "modules.builtin": builtin.encode()}.items():
            entry = tarfile.TarInfo(f"lib/modules/6.12/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return Kernel("6.12", folder / "vmlinux", folder / "modules.tar", "linux-image-6.12=1", "0" * 64)


def usual_modules() -> dict[str, bytes]:
    return {
        "kernel/drivers/net/virtio_net.ko.xz": lzma.compress(module("net_failover")),
        "kernel/drivers/net/net_failover.ko.xz": lzma.compress(module("failover")),
        "kernel/net/core/failover.ko.gz": gzip.compress(module()),
        "kernel/drivers/virtio/virtio_mmio.ko": module(),
        "kernel/drivers/block/virtio_blk.ko": module(),
        "kernel/drivers/char/hw_random/virtio-rng.ko": module(),
        "kernel/drivers/gpu/huge.ko": module(),
    }


def test_modules_come_after_what_they_depend_on(tmp_path: Path) -> None:
    names = [found.name for found in select_modules(kernel_with(tmp_path, usual_modules()))]
    assert names == ["virtio_mmio", "virtio_blk", "failover", "net_failover", "virtio_net", "virtio_rng"]


def test_missing_required_module_is_an_error_here_and_not_in_the_guest(tmp_path: Path) -> None:
    modules = usual_modules()
    del modules["kernel/drivers/block/virtio_blk.ko"]
    with pytest.raises(NotFound, match="virtio_blk"):
        select_modules(kernel_with(tmp_path, modules))
    built_in = "kernel/fs/ext4/ext4.ko\nkernel/drivers/block/virtio_blk.ko\n"
    assert "virtio_blk" not in [found.name for found in select_modules(kernel_with(tmp_path, modules, built_in))]


def test_missing_dependency_is_named(tmp_path: Path) -> None:
    modules = usual_modules()
    del modules["kernel/net/core/failover.ko.gz"]
    with pytest.raises(NotFound, match=r"failover is missing .*virtio_net -> net_failover"):
        select_modules(kernel_with(tmp_path, modules))


def test_load_order_of_a_diamond() -> None:
    depends = {"top": ("left", "right"), "left": ("base",), "right": ("base",), "base": ()}
    assert load_order(["top", "base"], depends.get) == ["base", "left", "right", "top"]
    assert load_order(["top"], depends.get, {"base"}) == ["left", "right", "top"]


def test_circle_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a -> b -> a"):
        load_order(["a"], {"a": ("b",), "b": ("a",)}.get)


def test_dependencies_are_read_from_the_module() -> None:
    assert module_depends(module("net-failover", "crc32c_generic")) == ("net_failover", "crc32c_generic")
    assert module_depends(module()) == ()
    with pytest.raises(InvalidInput, match="not a 64-bit ELF"):
        module_depends(b"\x7fELF\x01")
    with pytest.raises(InvalidInput, match="no section"):
        elf_section(STATIC_INIT, ".modinfo")
    with pytest.raises(InvalidInput, match="damaged"):
        elf_section(module()[:-100], ".modinfo")


def test_compressed_modules() -> None:
    plain = module("x")
    assert decompress_module("a.ko", plain) == plain
    assert decompress_module("a.ko.xz", lzma.compress(plain)) == plain
    assert decompress_module("a.ko.gz", gzip.compress(plain)) == plain


def test_archive_has_what_a_guest_needs(tmp_path: Path) -> None:
    made = ensure_initramfs(tmp_path / "cache", kernel_with(tmp_path, usual_modules()), write_init(tmp_path))
    archive = made.path.read_bytes()
    assert len(archive) % 4096 == 512
    entries = {entry.path: entry for entry in read_cpio(archive)}
    assert {"dev", "proc", "sys", "run", "newroot"} <= set(entries)
    assert entries["init"].data == STATIC_INIT
    assert entries["init"].mode == 0o100755
    assert entries["dev/console"].device == (5, 1)
    listed = entries["modules/load"].data.decode().split()
    assert tuple(listed) == made.modules
    assert all(entries[f"modules/{name}"].data.startswith(b"\x7fELF") for name in listed)


def test_cached_by_kernel_and_init(tmp_path: Path) -> None:
    kernel, init = kernel_with(tmp_path, usual_modules()), write_init(tmp_path)
    first = ensure_initramfs(tmp_path / "cache", kernel, init)
    written_ns = first.path.stat().st_mtime_ns
    assert ensure_initramfs(tmp_path / "cache", kernel, init) == first
    assert first.path.stat().st_mtime_ns == written_ns
    init.write_bytes(elf({".text": b"newer"}))
    assert ensure_initramfs(tmp_path / "cache", kernel, init).digest != first.digest
    other = Kernel("6.13", kernel.vmlinux, kernel.modules_tar, "linux-image-6.13=1", "1" * 64)
    assert ensure_initramfs(tmp_path / "cache", other, write_init(tmp_path)).digest != first.digest


def test_kernel_without_modules(tmp_path: Path) -> None:
    made = ensure_initramfs(tmp_path, Kernel("6.12", tmp_path / "vmlinux", None, "", "0" * 64), write_init(tmp_path))
    assert made.modules == ()
    assert {entry.path: entry.data for entry in read_cpio(made.path.read_bytes())}["modules/load"] == b""


def test_init_that_could_not_run_is_refused(tmp_path: Path) -> None:
    kernel, init = kernel_with(tmp_path, usual_modules()), tmp_path / "envd"
    with pytest.raises(InvalidInput, match="cannot read"):
        ensure_initramfs(tmp_path, kernel, init)
    init.write_text("#!/bin/sh\n")
    with pytest.raises(InvalidInput, match="not an x86-64 ELF"):
        ensure_initramfs(tmp_path, kernel, init)
    init.write_bytes(elf({".text": b"code"}, interpreter=True))
    with pytest.raises(InvalidInput, match="linked dynamically"):
        ensure_initramfs(tmp_path, kernel, init)


def test_same_input_same_bytes() -> None:
    assert pack(STATIC_INIT, []) == pack(STATIC_INIT, [])


def write_init(folder: Path) -> Path:
    init = folder / "envd"
    init.write_bytes(STATIC_INIT)
    return init
