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
from agentenv.host.cgroup import protect_from_oom
from agentenv.host.process import ProcessId

_START_DEADLINE_S = 10.0
_LINES_READ = 10


class BlockServer:
    """The node's blockd: `client` talks to it, whichever process it is at the time. `close` leaves it running."""

    def __init__(self, binary: Path, run: Path, log: Path, flags: Sequence[str] = ()) -> None:
        self.client = BlockClient(run / "blockd.sock")
        self._binary, self._run, self._log, self._flags = binary, run, log, flags
        self._process: ProcessId | None = None

    @property
    def process(self) -> ProcessId:
        """The one that answered last. Unavailable before `ensure_running`."""
        if self._process is None:
            raise Unavailable("blockd was not started yet")
        return self._process

    def is_alive(self) -> bool:
        """Whether that one still runs."""
        return self._process is not None and process.is_alive(self._process)

    async def ended(self) -> None:
        """Return at the moment that one ends. No deadline: the caller owns and cancels this."""
        await process.wait_ended(self.process)

    async def ensure_running(self) -> None:
        """Find it, or start it if need be. HostNotReady: wrong version, no FUSE, or it cannot start."""
        with contextlib.suppress(Unavailable):
            return await self._meet()
        if not self._binary.is_file():
            raise HostNotReady(f"{self._binary} is missing", "build the native programs with `make setup`")
        mount = self._run / "stacks"
        mount.parent.mkdir(parents=True, exist_ok=True)
        places = ["--socket", str(self.client.socket), "--mount", str(mount), "--ublk-state", str(self._run / "ublk")]
        argv = [str(self._binary), "serve", *places, *self._flags]
        started = await asyncio.to_thread(process.spawn, argv, self._log, self._run, None, {"PATH": os.defpath, "RUST_LOG": "info"})
        end = time.monotonic() + _START_DEADLINE_S
        while time.monotonic() < end and process.is_alive(started):
            with contextlib.suppress(Unavailable):
                return await self._meet()
            await asyncio.sleep(0.01)
        await asyncio.to_thread(process.kill, started)
        raise HostNotReady(
            f"blockd does not start: {_last_line(self._log)}",
            f"see {self._log}; `aenv doctor` checks what it needs (root, /dev/fuse); `make setup` builds it anew",
        )

    async def _meet(self) -> None:
        """Ask who answers. Unavailable: nobody; HostNotReady: another version."""
        info = await self.client.info()
        if info.get("protocol") != PROTOCOL:
            raise HostNotReady(
                f"the running blockd speaks protocol {info.get('protocol')}, this server {PROTOCOL}",
                "`aenv down`, then `aenv up` with one version",
            )
        pid = int(info["pid"])
        ticks = process.start_ticks(pid)
        if ticks is None:
            raise Unavailable(f"blockd (pid {pid}) has just ended")
        protect_from_oom(pid)
        self._process = ProcessId(pid, ticks)

    async def close(self) -> None:
        """Let go of it."""
        await self.client.close()


async def ensure_running(binary: Path, run: Path, log: Path, flags: Sequence[str] = ()) -> BlockClient:
    """A client of the node's blockd, started with `flags` if need be. HostNotReady as `BlockServer.ensure_running`."""
    server = BlockServer(binary, run, log, flags)
    try:
        await server.ensure_running()
    except BaseException:
        await server.close()
        raise
    return server.client


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
            await asyncio.to_thread(_wait_gone, ProcessId(pid, ticks), deadline_s)
    except Unavailable:
        return False
    finally:
        await client.close()
    return True


def _wait_gone(blockd: ProcessId, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while process.is_alive(blockd):
        if time.monotonic() > end:
            process.kill(blockd, term_first_s=2.0)
            return
        time.sleep(0.02)
    process.reap(blockd.pid)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()[-_LINES_READ:]
        said = [line for line in lines if line.startswith("error: ")]  # what it says of its arguments is followed by help
        return (said or lines or ["it wrote no message"])[-1]
    return "it wrote no log"
