"""Layers across implementations: the reference's golden files and ours are read right by a reader of the tests' own, and the other way."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import subprocess
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
from overlaybd_reader import Operation, apply, crc, read_layer, read_stack, write_upper

from agentenv.host import native

SIZE = 256 * 1024
ENCODINGS: list[list[str]] = [
    [],
    ["--tar"],
    *(["--compression", name, "--block-size-kib", str(kib)] for name, kib in itertools.product(("lz4", "zstd"), (4, 16, 64))),
    ["--compression", "lz4", "--tar"],
    ["--compression", "zstd", "--block-size-kib", "8", "--tar"],
]


def golden() -> tuple[Path, Any] | None:
    """The reference's files and their manifest, where they are at hand: they are no part of the repository."""
    shared = Path(os.environ.get("AENV_SHARED", Path(__file__).parents[4] / "shared"))
    folder = shared / "golden" / "overlaybd"
    if not (folder / "manifest.json").exists():
        warnings.warn(f"no golden files at {folder}: what the reference wrote was not read", stacklevel=2)
        return None
    return folder, json.loads((folder / "manifest.json").read_text())


def blockd(*arguments: str | Path) -> bytes:
    """Output of a subcommand that must work."""
    command = [native.program("blockd"), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout


def operations(rng: random.Random) -> list[Operation]:
    """Overlapping writes and discards of any whole sectors."""
    made = []
    for _ in range(rng.randint(1, 25)):
        offset = rng.randrange(SIZE // 512)
        length = 512 * rng.randint(1, min(120, SIZE // 512 - offset))
        kind = rng.randrange(4)
        data = None if kind == 0 else bytes([rng.randrange(256)]) * length if kind == 1 else rng.randbytes(length)
        made.append(Operation(offset * 512, length, data))
    return made


def test_the_reader_has_the_checksums_of_the_description() -> None:
    assert crc(0, b"123456789") == 0x58E3FA20
    assert crc(100007, bytes(4096)) == 0x18746CCD


def test_the_reader_reads_the_reference_right_at_every_depth() -> None:
    found = golden()
    if found is None:
        return
    folder, manifest = found
    layers = [folder / layer["file"] for layer in manifest["layers"]]
    for depth, layer in enumerate(manifest["layers"], 1):
        flat = read_stack(layers[:depth], manifest["virtual_size"])
        assert hashlib.sha256(flat).hexdigest() == layer["flat_sha256_through_here"]


def test_the_reference_with_its_upper_through_a_config(tmp_path: Path) -> None:
    found = golden()
    if found is None:
        return
    folder, manifest = found
    layers = [folder / layer["file"] for layer in manifest["layers"]]
    config, upper = tmp_path / "config.v1.json", manifest["upper"]
    blockd("config", config, *layers, "--data", folder / upper["data"], "--index", folder / upper["index"])
    assert hashlib.sha256(blockd("cat", config)).hexdigest() == upper["flat_sha256"]
    assert blockd("fsck", config) == b""
    for number, encoding in enumerate(ENCODINGS):
        output = tmp_path / f"flat-{number}"
        blockd("commit", output, config, *encoding)
        assert hashlib.sha256(read_stack([output], manifest["virtual_size"])).hexdigest() == upper["flat_sha256"]


@pytest.mark.parametrize("seed", range(2))
def test_stacks_of_every_encoding_read_the_same_to_both(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    disk, layers, parent = bytearray(SIZE), [], str(uuid.UUID(int=0))
    for number, encoding in enumerate(rng.sample(ENCODINGS, 6)):
        made, identity = operations(rng), str(uuid.UUID(int=rng.getrandbits(128), version=4))
        data, index, layer = (tmp_path / f"{number}.{name}" for name in ("data", "index", "layer"))
        write_upper(data, index, SIZE, made, identity, parent.upper())
        apply(disk, made)
        blockd("commit", layer, "--data", data, "--index", index, "--uuid", identity, "--tag", f"layer {number}", *encoding)
        layers.append(layer)
        read = read_layer(layer)
        assert (read.virtual_size, read.tag) == (SIZE, f"layer {number}")
        # Tools of the reference write upper case and compare it so.
        assert (read.uuid, read.parent_uuid) == (identity.upper(), parent.upper())
        assert read_stack(layers, SIZE) == disk
        config = tmp_path / "config.v1.json"
        blockd("config", config, *layers)
        assert blockd("cat", config) == disk
        assert blockd("fsck", "--parents", config) == b""
        parent = identity
    flat = tmp_path / "flat"
    blockd("commit", flat, *layers)
    assert read_stack([flat], SIZE) == disk
