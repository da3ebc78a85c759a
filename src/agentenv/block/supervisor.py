"""Starts blockd when it does not run, and finds it when it does. blockd lives on when the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from agentenv.block.client import PROTOCOL, BlockClient
from agentenv.config.schema import ImagesConfig
from agentenv.core.errors import Conflict, HostNotReady, Unavailable
from agentenv.host import process

_START_DEADLINE_S = 10.0
_LINES_READ = 10


async def ensure_running(binary: Path, run: Path, log: Path, flags: Sequence[str] = ()) -> BlockClient:
    """A client of the node's blockd, started with `flags` if need be. HostNotReady: wrong version, no FUSE, or it cannot start."""
    if not binary.is_file():
        raise HostNotReady(f"{binary} is missing", "build the native programs with `make setup`")
    client = BlockClient(run / "blockd.sock")
    try:
        with contextlib.suppress(Unavailable):
            return _checked(client, await client.info())
        mount = run / "stacks"
        mount.parent.mkdir(parents=True, exist_ok=True)
        places = ["--socket", str(client.socket), "--mount", str(mount), "--ublk-state", str(run / "ublk")]
        argv = [str(binary), "serve", *places, *flags]
        started = await asyncio.to_thread(process.spawn, argv, log, run, None, {"PATH": os.defpath, "RUST_LOG": "info"})
        end = time.monotonic() + _START_DEADLINE_S
        while time.monotonic() < end and process.is_alive(started):
            with contextlib.suppress(Unavailable):
                return _checked(client, await client.info())
            await asyncio.sleep(0.01)
        await asyncio.to_thread(process.kill, started)
        raise HostNotReady(
            f"blockd does not start: {_last_line(log)}",
            f"see {log}; `aenv doctor` checks what it needs (root, /dev/fuse); `make setup` builds it anew",
        )
    except BaseException:
        await client.close()
        raise


def remote_flags(cache: Path, images: ImagesConfig, reserve_mb: int, helper_logins: Path) -> list[str]:
    """How blockd reads layers that are in registries; its blocks go below `cache`, and leave `reserve_mb` MiB of the disk free.

    Logins are those in `helper_logins`, else those in docker's config; both are read anew at each use.
    """
    return [
        *("--remote-cache", str(cache / "blocks"), "--remote-cache-mib", str(images.block_cache_mb)),
        *("--remote-reserve-mib", str(reserve_mb)),
        *("--remote-connections", str(images.block_connections), "--certs-dir", str(images.certs_dir)),
        *("--download-mib-per-s", str(images.download_mb_per_s), "--download-delay-s", str(images.download_delay_s)),
        *("--docker-config", str(helper_logins), "--docker-config", str(images.docker_config_file)),
        *("--trace-s", str(images.trace_s)),
    ]


async def stop(run: Path, deadline_s: float = 10.0) -> bool:
    """Ask the node's blockd to end, forcing it when devices are still in use. False when none runs."""
    client = BlockClient(run / "blockd.sock")
    try:
        info = await client.info()
        pid = int(info["pid"])
        ticks = process.start_ticks(pid)
        try:
            await client.shutdown()
        except Conflict:
            await client.shutdown(force=True)
        if ticks is not None:
            await asyncio.to_thread(_wait_gone, process.ProcessId(pid, ticks), deadline_s)
    except Unavailable:
        return False
    finally:
        await client.close()
    return True


def _wait_gone(blockd: process.ProcessId, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while process.is_alive(blockd):
        if time.monotonic() > end:
            process.kill(blockd, term_first_s=2.0)
            return
        time.sleep(0.02)
    process.reap(blockd.pid)


def _checked(client: BlockClient, info: dict[str, object]) -> BlockClient:
    if info.get("protocol") != PROTOCOL:
        raise HostNotReady(
            f"the running blockd speaks protocol {info.get('protocol')}, this server {PROTOCOL}",
            "`aenv down`, then `aenv up` with one version",
        )
    return client


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()[-_LINES_READ:]
        said = [line for line in lines if line.startswith("error: ")]  # what it says of its arguments is followed by help
        return (said or lines or ["it wrote no message"])[-1]
    return "it wrote no log"
