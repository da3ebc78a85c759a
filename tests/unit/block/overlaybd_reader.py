"""Reads overlaybd layers, written from the format's description alone: no code is shared with the product, and nothing is fast.

Layer file: [tar wrapper] around [ZFile] around LSMT, the outer two optional. `read_stack` gives the flat bytes of layers, bottom first;
`write_upper` makes the two files of a writable layer. Everything is little-endian; a sector is 512 bytes.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SECTOR = 512
LSMT_MAGIC = b"LSMT\x00\x01\x02\x00" + bytes.fromhex("657e63d29444084ca2d2c8ec4fcfae8a")
ZFILE_MAGIC = b"ZFile\x00\x01\x00tuji.yyf@Alibaba"
PADDING_OFFSET = 2**50 - 1
HEADER, DATA, SEALED, SPARSE, HYBRID = 1, 2, 4, 16, 32


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def crc(seed: int, data: bytes) -> int:
    """CRC-32C as a raw register, without the final inversion."""
    for byte in data:
        seed = _TABLE[(seed ^ byte) & 0xFF] ^ seed >> 8
    return seed


def lz4_block(data: bytes) -> bytes:
    """The content of one LZ4 block."""
    out, at = bytearray(), 0

    def length(value: int) -> int:
        nonlocal at
        if value == 15:
            while True:
                byte = data[at]
                at += 1
                value += byte
                if byte != 255:
                    break
        return value

    while True:
        token = data[at]
        at += 1
        literals = length(token >> 4)
        out += data[at : at + literals]
        at += literals
        if at == len(data):
            return bytes(out)
        distance = struct.unpack_from("<H", data, at)[0]
        at += 2
        for _ in range(length(token & 15) + 4):
            out.append(out[-distance])


def zstd_frames(data: bytes) -> bytes:
    """The content of Zstandard frames, one after the other."""
    return subprocess.run(["zstd", "-dc"], input=data, stdout=subprocess.PIPE, check=True, timeout=60).stdout


def unwrap_tar(blob: bytes) -> bytes:
    """The content of the first file of a tar archive; anything else as it is."""
    if blob[257:265] != b"ustar\x0000":
        return blob
    at, size = 0, None
    if blob[156:157] == b"x":
        record_bytes = int(blob[124:136].strip(b" \0"), 8)
        for line in blob[512 : 512 + record_bytes].decode().splitlines():
            key, value = line.split(" ", 1)[1].split("=")
            if key == "size":
                size = int(value)
        at = 512 + (record_bytes + 511) // 512 * 512
    if size is None:
        size = int(blob[at + 124 : at + 136].strip(b" \0"), 8)
    return blob[at + 512 : at + 512 + size]


def unwrap_zfile(blob: bytes) -> bytes:
    """The content of a ZFile, with every checksum compared; anything else as it is."""
    if not blob.startswith(ZFILE_MAGIC):
        return blob
    head = blob[:512]
    if not struct.unpack_from("<Q", head, 32)[0] & 8:
        head = blob[-512:]
    assert head.startswith(ZFILE_MAGIC)
    struct_size, digest = struct.unpack_from("<II", head, 24)
    assert struct_size == 96
    assert crc(0, head[:28] + bytes(4) + head[32:]) == digest
    _, index_offset, count, original, index_crc, _, block_size = struct.unpack_from("<QQQQIII", head, 32)
    algorithm, verify = head[76], head[88]
    assert block_size in (4096, 8192, 16384, 32768, 65536)
    table = blob[index_offset : index_offset + 4 * count]
    assert crc(0, table) == index_crc
    assert verify == 1
    at, frames = 512, []
    for stored in struct.unpack(f"<{count}I", table):
        block, checksum = blob[at : at + stored - 4], struct.unpack_from("<I", blob, at + stored - 4)[0]
        assert crc(100007, block) == checksum
        frames.append(block)
        at += stored
    assert at == index_offset
    content = zstd_frames(b"".join(frames)) if algorithm == 2 else b"".join(lz4_block(frame) for frame in frames)
    assert len(content) == original
    return content


@dataclass(frozen=True)
class Entry:
    """A range of the disk, in sectors, and where its data lies; zeroed ranges have none."""

    offset: int
    length: int
    place: int
    zeroed: bool


@dataclass(frozen=True)
class Layer:
    """A sealed layer."""

    content: bytes
    flags: int
    virtual_size: int
    uuid: str
    parent_uuid: str
    tag: str
    entries: list[Entry]


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode()


def entries_of(raw: bytes) -> Iterator[Entry]:
    """Index entries, without padding."""
    for first, second in struct.iter_unpack("<QQ", raw):
        if first & PADDING_OFFSET != PADDING_OFFSET:
            yield Entry(first & PADDING_OFFSET, first >> 50, second & (1 << 55) - 1, bool(second >> 55 & 1))


def read_layer(path: Path) -> Layer:
    """A layer of any wrapping, with the rules of its index asserted."""
    content = unwrap_zfile(unwrap_tar(path.read_bytes()))
    header, trailer = content[:4096], content[-4096:]
    for block in (header, trailer):
        assert block.startswith(LSMT_MAGIC)
        assert struct.unpack_from("<I", block, 24)[0] == 390
    assert struct.unpack_from("<I", header, 28)[0] & (HEADER | DATA) == HEADER | DATA
    flags, index_offset, count, virtual_size = struct.unpack_from("<IQQQ", trailer, 28)
    assert flags & (HEADER | DATA | SEALED) == DATA | SEALED
    entries = list(entries_of(content[index_offset : index_offset + 16 * count]))
    last_end = 0
    for entry in entries:
        assert entry.length > 0
        assert entry.offset >= last_end
        last_end = entry.offset + entry.length
        assert entry.place >= 8
        assert (entry.place + (0 if entry.zeroed else entry.length)) * SECTOR <= index_offset
    return Layer(content, flags, virtual_size, _text(trailer[56:93]), _text(trailer[93:130]), _text(trailer[134:390]), entries)


def read_stack(paths: Sequence[Path], size: int) -> bytes:
    """Flat bytes of layers, bottom first."""
    disk = bytearray(size)
    for path in paths:
        layer = read_layer(path)
        for entry in layer.entries:
            at, length = entry.offset * SECTOR, entry.length * SECTOR
            data = bytes(length) if entry.zeroed else layer.content[entry.place * SECTOR :][:length]
            disk[at : at + length] = data
    return bytes(disk)


@dataclass(frozen=True)
class Operation:
    """One change of a disk, in bytes that are whole sectors; no data means a discard."""

    offset: int
    length: int
    data: bytes | None


def apply(disk: bytearray, operations: Sequence[Operation]) -> None:
    """The same changes on flat bytes."""
    for one in operations:
        disk[one.offset : one.offset + one.length] = one.data or bytes(one.length)


def lsmt_block(flags: int, index_offset: int, size: int, uuid: str, parent_uuid: str) -> bytes:
    """A header block of an upper's file."""
    fields = LSMT_MAGIC + struct.pack("<IIQQQ", 390, flags, index_offset, 0, size)
    names = uuid.encode().ljust(37, b"\0") + parent_uuid.encode().ljust(37, b"\0")
    return (fields + names + bytes([0, 0, 1, 1])).ljust(4096, b"\0")


def write_upper(data: Path, index: Path, size: int, operations: Sequence[Operation], uuid: str, parent_uuid: str) -> None:
    """The files of an append upper that saw the operations, with a tag in each record as the reference leaves them."""
    content = bytearray(lsmt_block(HEADER | DATA, 0, size, uuid, parent_uuid))
    records = bytearray(lsmt_block(HEADER, 4096, size, uuid, parent_uuid))
    for one in operations:
        place, zeroed = len(content) // SECTOR, one.data is None
        first = one.offset // SECTOR | one.length // SECTOR << 50
        records += struct.pack("<QQ", first, place | zeroed << 55 | 1 << 56)
        content += one.data or b""
    data.write_bytes(content)
    index.write_bytes(records)
