"""The initramfs archive format: our writer against our reader, the cpio tool, and the padding rule."""

import shutil
import stat
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core.errors import InvalidInput
from agentenv.guest.cpio import CpioEntry, CpioWriter, padding_bytes, read_cpio


def sample() -> CpioWriter:
    writer = CpioWriter()
    writer.folder("dev")
    writer.character_device("dev/console", 5, 1)
    writer.file("init", b"#!/bin/sh\n", 0o755)
    writer.folder("modules", 0o700)
    writer.file("modules/empty", b"")
    writer.file("modules/odd", b"12345")
    return writer


def test_reader_sees_what_was_written() -> None:
    entries = list(read_cpio(sample().finish()))
    assert entries == [
        CpioEntry("dev", stat.S_IFDIR | 0o755),
        CpioEntry("dev/console", stat.S_IFCHR | 0o600, b"", (5, 1)),
        CpioEntry("init", stat.S_IFREG | 0o755, b"#!/bin/sh\n"),
        CpioEntry("modules", stat.S_IFDIR | 0o700),
        CpioEntry("modules/empty", stat.S_IFREG | 0o644),
        CpioEntry("modules/odd", stat.S_IFREG | 0o644, b"12345"),
    ]


def test_first_entry_is_as_the_format_draws_it() -> None:
    writer = CpioWriter()
    writer.file("ab", b"xyz", 0o640)
    archive = writer.finish()
    numbers = [1, stat.S_IFREG | 0o640, 0, 0, 1, 0, 3, 0, 0, 0, 0, 3, 0]
    header = "070701" + "".join(f"{number:08X}" for number in numbers)
    assert archive[:120] == header.encode() + b"ab\0" + bytes(3) + b"xyz\0"
    assert archive[120:].startswith(b"070701")
    assert b"TRAILER!!!\0" in archive


def test_same_entries_same_bytes() -> None:
    assert sample().finish() == sample().finish()


@pytest.mark.skipif(shutil.which("cpio") is None, reason="needs the cpio tool")
def test_cpio_tool_reads_it(tmp_path) -> None:
    listed = subprocess.run(["cpio", "-i", "--quiet", "-t"], input=sample().finish(), capture_output=True, check=True, timeout=20)
    assert listed.stdout.decode().split() == ["dev", "dev/console", "init", "modules", "modules/empty", "modules/odd"]
    subprocess.run(["cpio", "-i", "--quiet", "-d", "init", "modules/*"], input=sample().finish(), cwd=tmp_path, check=True, timeout=20)
    assert (tmp_path / "init").read_bytes() == b"#!/bin/sh\n"
    assert (tmp_path / "init").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "modules/odd").read_bytes() == b"12345"


@given(st.integers(min_value=0, max_value=1 << 33))
def test_padding_leaves_most_of_the_last_page_to_the_firmware(size_bytes: int) -> None:
    padding = padding_bytes(size_bytes)
    assert 0 <= padding < 4096
    assert (size_bytes + padding) % 4096 == 512


@pytest.mark.parametrize("size_bytes", [0, 1, 511, 512, 513, 4095, 4096, 5000, 10_000])
def test_archive_is_padded(size_bytes: int) -> None:
    writer = CpioWriter()
    writer.file("data", b"\xff" * size_bytes)
    archive = writer.finish()
    assert len(archive) % 4096 == 512
    assert [entry.data for entry in read_cpio(archive)] == [b"\xff" * size_bytes]


@pytest.mark.parametrize("path", ["/init", "a//b", "../x", "a/../b", "", ".", "a\0b", "TRAILER!!!"])
def test_odd_paths_are_refused(path: str) -> None:
    with pytest.raises(InvalidInput):
        CpioWriter().file(path, b"")


def test_parent_must_come_first_and_nothing_twice() -> None:
    writer = CpioWriter()
    with pytest.raises(InvalidInput, match="must be added first"):
        writer.file("modules/a.ko", b"")
    writer.file("init", b"")
    with pytest.raises(InvalidInput, match="twice"):
        writer.file("init", b"")


@pytest.mark.parametrize("length", [0, 50, 109, 111, 130])
def test_cut_archive_is_refused(length: int) -> None:
    with pytest.raises(InvalidInput):
        list(read_cpio(sample().finish()[:length]))


def test_bad_number_is_refused() -> None:
    archive = bytearray(sample().finish())
    archive[6:14] = b"zzzzzzzz"
    with pytest.raises(InvalidInput, match="bad number"):
        list(read_cpio(bytes(archive)))
