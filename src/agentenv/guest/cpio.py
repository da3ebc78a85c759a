"""Writer and reader of the "newc" cpio format, as the kernel unpacks it (Linux Documentation/driver-api/early-userspace/buffer-format.rst).

An archive is a row of entries, then zeros up to a size that suits the firmware (`padding_bytes`):

    offset  size  field                      all numbers are 8 upper-case hex digits
         0     6  "070701"
         6   8x13 ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check(0)
       110  name  the path, no leading "/", ending in one NUL; namesize counts it
          .    .  zeros up to a multiple of 4 from the start of the archive
          .  size data (a file's bytes, a link's target), again zeros up to a multiple of 4

The last entry is named "TRAILER!!!". Invariants: same entries, same bytes (owner root, time 0, numbers in order of
writing); a parent folder is written before what it holds.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass

from agentenv.core.errors import InvalidInput

MAGIC = b"070701"
HEADER_BYTES = 110
TRAILER = "TRAILER!!!"
MAX_FILE_BYTES = 0xFFFFFFFF
"""What the 8 hex digits of a size can say."""

PAGE_BYTES = 4096
LAST_PAGE_BYTES = 512
"""How far an archive reaches into its last page; see `padding_bytes`. `cpio` itself fills up to 512 too."""


@dataclass(frozen=True)
class CpioEntry:
    """One file, folder, link or device node. `mode` has the type bits of stat(2); `data` is a file's content or a link's target."""

    path: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


class CpioWriter:
    """Collects entries in memory; `finish` gives the archive."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._paths: set[str] = set()

    def folder(self, path: str, permissions: int = 0o755) -> None:
        """Add a folder."""
        self.add(CpioEntry(path, stat.S_IFDIR | permissions))

    def file(self, path: str, data: bytes, permissions: int = 0o644) -> None:
        """Add a regular file."""
        self.add(CpioEntry(path, stat.S_IFREG | permissions, data))

    def character_device(self, path: str, major: int, minor: int, permissions: int = 0o600) -> None:
        """Add a character device node."""
        self.add(CpioEntry(path, stat.S_IFCHR | permissions, device=(major, minor)))

    def add(self, entry: CpioEntry) -> None:
        """Add an entry. Raises InvalidInput for a path that is absolute, steps up, repeats, or comes before its folder."""
        parts = entry.path.split("/")
        if "" in parts or "." in parts or ".." in parts or "\0" in entry.path or entry.path == TRAILER:
            raise InvalidInput(f"not a usable path in an initramfs: {entry.path!r}")
        if entry.path in self._paths:
            raise InvalidInput(f"{entry.path} is in the initramfs twice")
        if len(parts) > 1 and "/".join(parts[:-1]) not in self._paths:
            raise InvalidInput(f"the folder of {entry.path} must be added first")
        self._write(entry, len(self._paths) + 1)
        self._paths.add(entry.path)

    def _write(self, entry: CpioEntry, number: int) -> None:
        if len(entry.data) > MAX_FILE_BYTES:
            raise InvalidInput(f"{entry.path} is too large for a cpio archive: {len(entry.data)} bytes")
        name = entry.path.encode() + b"\0"
        links = 2 if stat.S_ISDIR(entry.mode) else 1
        numbers = (number, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
        header = MAGIC + b"".join(b"%08X" % value for value in numbers)
        for part in (header + name, entry.data):
            self._parts += [part, bytes(-len(part) % 4)]

    def finish(self) -> bytes:
        """The archive, with its trailer and its padding."""
        self._write(CpioEntry(TRAILER, 0), 0)
        archive = b"".join(self._parts)
        return archive + bytes(padding_bytes(len(archive)))


def padding_bytes(size_bytes: int) -> int:
    """How many zeros to append to an initramfs of `size_bytes`, so that size % 4096 is 512.

    QEMU's microvm puts the initramfs at the top of guest memory, its start rounded down to a page, so only the rest of
    its last page stays free above it; and there the firmware writes its ACPI tables. With too little room they
    overlap: the guest hangs after "ACPI: Core revision" or finds no devices (measured with QEMU 10.0.2: remainders up
    to 3072 boot, 3584 and more never do). 512 leaves 3584 bytes free, and unlike 0 does not lean on how the rounding is
    done. Zeros after the trailer are allowed.
    """
    return (LAST_PAGE_BYTES - size_bytes) % PAGE_BYTES


def read_cpio(archive: bytes) -> Iterator[CpioEntry]:
    """The entries of an archive without its trailer. Raises InvalidInput where it is malformed."""
    position = 0
    while True:
        header = archive[position : position + HEADER_BYTES]
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            raise InvalidInput(f"no cpio entry at byte {position}")
        try:
            numbers = [int(header[start : start + 8], 16) for start in range(6, HEADER_BYTES, 8)]
        except ValueError as error:
            raise InvalidInput(f"bad number in the cpio entry at byte {position}") from error
        mode, size_bytes, name_bytes = numbers[1], numbers[6], numbers[11]
        name_start = position + HEADER_BYTES
        data_start = name_start + name_bytes + (-(HEADER_BYTES + name_bytes) % 4)
        position = data_start + size_bytes + (-size_bytes % 4)
        if position > len(archive) or name_bytes < 2:
            raise InvalidInput("the cpio archive is cut short")
        name = archive[name_start : name_start + name_bytes - 1].decode(errors="replace")
        if name == TRAILER:
            return
        yield CpioEntry(name, mode, archive[data_start : data_start + size_bytes], (numbers[9], numbers[10]))
