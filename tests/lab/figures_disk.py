"""4 KiB reads past the page cache, of the same layer as a ublk device and as a FUSE file, by one that asks as a VMM does."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

from figure import Figure

from agentenv.block.client import BlockClient, Upper
from agentenv.core.paths import NodePaths

READ_BYTES, DEPTHS, READS, READ_ROUNDS = 64 << 20, (1, 8, 32, 64), 20_000, 5
BOUND_DEPTH = 32


async def _opened(blocks: BlockClient, folder: Path, layer: Path, export: Any) -> Path:
    upper = Upper(folder / f"{export}.lsmt", folder / f"{export}.index")
    return (await blocks.open(f"figures-{export}", (layer,), upper, None, "direct", export)).path


async def disk_figures(here: Path, paths: NodePaths) -> list[Figure]:
    """Reads of a layer of random bytes, in turn as both."""
    folder = here / "figures"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "raw").write_bytes(os.urandom(READ_BYTES))
    blocks = BlockClient(paths.blockd_socket)
    found = []
    try:
        await blocks.import_raw(folder / "raw", folder / "layer.lsmt")
        devices = {export: await _opened(blocks, folder, folder / "layer.lsmt", export) for export in ("fuse", "ublk")}
        for depth in DEPTHS:
            rounds = [[await asyncio.to_thread(reads_per_s, here, path, depth) for path in devices.values()] for _ in range(READ_ROUNDS)]
            fuse, ublk = (statistics.median(column) for column in zip(*rounds, strict=True))
            found.append(Figure(f"4 KiB reads, {depth} at a time: FUSE (median)", fuse, "per s"))
            found.append(Figure(f"4 KiB reads, {depth} at a time: ublk (median)", ublk, "per s"))
            least = 2.0 if depth == BOUND_DEPTH else None
            found.append(Figure(f"4 KiB reads, {depth} at a time: ublk of FUSE", ublk / fuse, "times", least=least))
    finally:
        for export in ("fuse", "ublk"):
            await blocks.close_stack(f"figures-{export}", force=True)
        await blocks.close()
        shutil.rmtree(folder)
    return found


def reads_per_s(here: Path, path: Path, depth: int) -> float:
    """4 KiB reads past the page cache in a second, so many under way at any time."""
    command = [str(here / "reads"), "random", str(path), str(depth), str(READS)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
