"""What blockd costs: beside reading the raw file, beside a minimal FUSE passthrough of it, and for compressed layers and large indexes.

Part of `make bench`; alone: `.venv/bin/python tests/bench/blocks.py`. Needs root, FUSE and cargo. All sides work on one host file that
is in the page cache, in turn, round by round; medians are compared. `AENV_BENCH_ROUNDS` (default 5).
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bounds
import httpx
from rich.console import Console
from rich.table import Table

from agentenv.host import native

ROOT = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("AENV_BENCH_ROUNDS", "5"))
FILE_BYTES = 256 << 20
SEQUENTIAL_BYTES = 512 << 10  # about the largest request that a guest's disk makes; as `examples/reads.rs` has it
SEQUENTIAL_READS = 4 * FILE_BYTES // SEQUENTIAL_BYTES
AHEAD = 4  # reads that one who reads ahead has under way, as guests and VMMs do
RANDOM_BYTES = 4096
RANDOM_SECONDS = 0.5
INDEX_LAYERS, INDEX_ENTRIES = 4, 1_000_000
START_DEADLINE_S = 30.0
BUILD_DEADLINE_S = 900.0
CALL_DEADLINE_S = 120.0
BOUNDS = {
    "sequential read, four under way, ratio to the raw file": (0.6, "at least"),
    "4 KiB random reads, ratio to a passthrough": (0.7, "at least"),
    "4 KiB random writes, ratio to a passthrough": (0.7, "at least"),
    "opening 1,000,000 index entries, s": (1.0, "at most"),
    "memory of 1,000,000 index entries, MB": (64.0, "at most"),
}
err = Console(stderr=True)


class Blockd:
    """A blockd of the bench's own."""

    def __init__(self, folder: Path) -> None:
        self.socket, self.mount = folder / "socket", folder / "mount"
        command = [native.program("blockd"), "serve", "--socket", self.socket, "--mount", self.mount]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        _wait_for(lambda: _answers(self.socket), self.process)
        transport = httpx.HTTPTransport(uds=str(self.socket))
        self.http = httpx.Client(transport=transport, base_url="http://blockd", timeout=CALL_DEADLINE_S)

    def call(self, method: str, path: str, body: dict[str, Any]) -> None:
        """One call that must work."""
        self.http.request(method, path, json=body).raise_for_status()

    def open(self, name: str, layers: list[Path], **more: object) -> Path:
        """The file of a stack, past the page cache unless told otherwise."""
        self.call("PUT", f"/v1/stacks/{name}", {"lowers": [str(layer) for layer in layers], "cache": "direct", **more})
        return self.mount / name

    def memory_bytes(self) -> int:
        """Resident memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS"))

    def stop(self) -> None:
        """Ends it and its mount."""
        self.http.close()
        self.process.terminate()
        self.process.wait(START_DEADLINE_S)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{process.args} did not start; this part of the bench needs root and /dev/fuse")
        time.sleep(0.01)


@functools.cache
def example(name: str) -> Path:
    """A program beside blockd's code, built."""
    command = ["cargo", "build", "--release", "--locked", "-q", "-p", "blockd", "--example", name]
    subprocess.run(command, cwd=ROOT / "native", check=True, timeout=BUILD_DEADLINE_S)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "native" / "target")) / "release" / "examples" / name


@contextlib.contextmanager
def passthrough(file: Path, folder: Path) -> Iterator[Path]:
    """The file through a FUSE server that does nothing else."""
    program = example("passthrough")
    mount = folder / "passthrough"
    mount.mkdir()
    process = subprocess.Popen([program, file, mount])
    try:
        _wait_for((mount / "file").exists, process)
        yield mount / "file"
    finally:
        subprocess.run(["umount", mount], check=False)
        process.terminate()
        process.wait(START_DEADLINE_S)


def sequential(path: Path, depth: int) -> float:
    """Bytes a second of reading it in large pieces, so many under way at any time, by one thread."""
    command = [example("reads"), "sequential", path, str(depth), str(SEQUENTIAL_READS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=CALL_DEADLINE_S)
    return float(done.stdout) * SEQUENTIAL_BYTES


def _random(path: Path, mode: str, work: Callable[[int, int], int]) -> float:
    rng = random.Random(1)
    places = [rng.randrange(FILE_BYTES // RANDOM_BYTES) * RANDOM_BYTES for _ in range(4096)]
    with open(path, mode, buffering=0) as file:
        descriptor, count, began = file.fileno(), 0, time.perf_counter()
        while time.perf_counter() - began < RANDOM_SECONDS:
            for _ in range(64):
                work(descriptor, places[count % len(places)])
                count += 1
        return count / (time.perf_counter() - began)


def random_reads(path: Path) -> float:
    """4 KiB reads a second, one after the other."""
    buffers = [bytearray(RANDOM_BYTES)]
    return _random(path, "rb", lambda descriptor, place: os.preadv(descriptor, buffers, place))


def random_writes(path: Path) -> float:
    """4 KiB writes a second, one after the other."""
    block = os.urandom(RANDOM_BYTES)
    return _random(path, "r+b", lambda descriptor, place: os.pwrite(descriptor, block, place))


def make_content(path: Path) -> None:
    """Half of it text that compresses as files do, half of it random."""
    words = random.Random(1).choices([os.urandom(3).hex().encode() for _ in range(500)], k=20_000)
    text = b" ".join(words)
    with open(path, "wb") as file:
        while file.tell() < FILE_BYTES:
            file.write(text[: 64 << 10].ljust(64 << 10))
            file.write(os.urandom(64 << 10))
        file.truncate(FILE_BYTES)


def write_index_layer(path: Path, number: int) -> None:
    """A layer of nothing but index entries, which lie between those of the others."""
    magic = b"LSMT\x00\x01\x02\x00" + bytes.fromhex("657e63d29444084ca2d2c8ec4fcfae8a")
    count = INDEX_ENTRIES // INDEX_LAYERS

    def block(flags: int, offset: int, size: int) -> bytes:
        fields = magic + struct.pack("<IIQQQ", 390, flags, offset, size, INDEX_ENTRIES * 16 * 512)
        return (fields.ljust(132, b"\0") + b"\1\1").ljust(4096, b"\0")

    places = range(number * 16, INDEX_ENTRIES * 16, INDEX_LAYERS * 16)
    entries = b"".join(struct.pack("<QQ", place | 8 << 50, 8 | 1 << 55) for place in places)
    path.write_bytes(block(7, 0, 0) + entries + block(6, 4096, count))


def large_index(folder: Path) -> dict[str, float]:
    """Seconds and memory that opening a million index entries takes."""
    layers = [folder / f"index-{number}" for number in range(INDEX_LAYERS)]
    for number, layer in enumerate(layers):
        write_index_layer(layer, number)
    seconds, memory = [], []
    for _ in range(ROUNDS):
        blockd = Blockd(folder)
        before, began = blockd.memory_bytes(), time.perf_counter()
        blockd.open("index", layers)
        seconds.append(time.perf_counter() - began)
        memory.append((blockd.memory_bytes() - before) / 1e6)
        blockd.stop()
    return {"seconds": statistics.median(seconds), "memory_mb": statistics.median(memory)}


def measure() -> dict[str, Any]:
    """Everything, in turn. Works in the folder for temporary files, which should be on a disk."""
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as name:
        folder = Path(name)
        err.print(f"==> blockd beside the raw file and a passthrough, {ROUNDS} rounds", highlight=False)
        raw, twin = folder / "raw", folder / "twin"
        make_content(raw)
        twin.write_bytes(raw.read_bytes())
        blockd = Blockd(folder)
        try:
            layers = {"plain": folder / "plain.lsmt"}
            blockd.call("POST", "/v1/imports", {"source": str(raw), "output": str(layers["plain"])})
            for algorithm in ("lz4", "zstd"):
                layers[algorithm] = folder / algorithm
                body = {"lowers": [str(layers["plain"])], "output": str(layers[algorithm]), "compression": {"algorithm": algorithm}}
                blockd.call("POST", "/v1/commits", body)
            upper = {"data": str(folder / "upper"), "index": str(folder / "upper.index")}
            paths = {name: blockd.open(name, [layer]) for name, layer in layers.items()}
            with passthrough(twin, folder) as beside:
                paths |= {
                    "raw": raw,
                    "passthrough": beside,
                    "writable": blockd.open("writable", [layers["plain"]], upper=upper, upper_layout="hybrid"),
                }
                result = _rounds(paths)
            result["stored_mb"] = {name: layer.stat().st_size / 1e6 for name, layer in layers.items()}
        finally:
            blockd.stop()
        result["index"] = large_index(folder)
    return result


def _rounds(paths: dict[str, Path]) -> dict[str, Any]:
    kinds: dict[str, tuple[Callable[[Path], float], tuple[str, ...]]] = {
        "sequential": (lambda path: sequential(path, 1), ("raw", "passthrough", "plain", "lz4", "zstd")),
        "sequential_ahead": (lambda path: sequential(path, AHEAD), ("raw", "passthrough", "plain", "lz4", "zstd")),
        "random_reads": (random_reads, ("raw", "passthrough", "plain", "lz4", "zstd")),
        "random_writes": (random_writes, ("passthrough", "writable")),
    }
    found: dict[str, dict[str, list[float]]] = {kind: {side: [] for side in sides} for kind, (_, sides) in kinds.items()}
    for number in range(ROUNDS + 1):
        for kind, (work, sides) in kinds.items():
            for side in sides:
                value = work(paths[side])
                if number:  # the first round only warms the page cache
                    found[kind][side].append(value)
    return {kind: {side: statistics.median(values) for side, values in sides.items()} for kind, sides in found.items()}


def report(result: dict[str, Any]) -> bool:
    """Print the tables; true when every bound holds."""
    out = Console()
    table = Table(title=f"blockd through FUSE, medians of {ROUNDS} rounds in turn")
    for column in ("what", "stored MB", "sequential MB/s", "four under way", "4 KiB reads/s", "4 KiB writes/s"):
        table.add_column(column, justify="left" if column == "what" else "right")
    kinds = (("sequential", 1e6), ("sequential_ahead", 1e6), ("random_reads", 1), ("random_writes", 1))
    for side in ("raw", "passthrough", "plain", "lz4", "zstd", "writable"):
        cells = [f"{result[kind][side] / unit:,.0f}" if side in result[kind] else "" for kind, unit in kinds]
        stored = result["stored_mb"].get(side)
        table.add_row(side, "" if stored is None else f"{stored:.0f}", *cells)
    out.print(table)
    found = [
        result["sequential_ahead"]["plain"] / result["sequential_ahead"]["raw"],
        result["random_reads"]["plain"] / result["random_reads"]["passthrough"],
        result["random_writes"]["writable"] / result["random_writes"]["passthrough"],
        result["index"]["seconds"],
        result["index"]["memory_mb"],
    ]
    result["bounds"], good = bounds.report(out, "bounds of blockd", BOUNDS, found)
    return good


if __name__ == "__main__":
    bounds.run(measure, report)
