"""Checks of the product itself for `aenv doctor`: its programs, the VMM, the server. The host's own are in `host.doctor`."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentenv import __version__
from agentenv.block.client import PROTOCOL, BlockClient
from agentenv.cli.node import node_paths, node_url, read_record
from agentenv.cli.server import troubles
from agentenv.core.errors import AgentEnvError, HostNotReady
from agentenv.host import native
from agentenv.host.doctor import Check, port_is_free
from agentenv.host.listeners import describe_holder

if TYPE_CHECKING:
    from agentenv.config.schema import Config

VERSION_DEADLINE_S = 10.0


def product_checks(config: Config) -> list[Check]:
    """Every check of the product, in the order it starts up."""
    return [replace(check, group="installation") for check in (_blockd(config), _native("envd"), _vmm(config), _server(config))]


def _native(name: str, argument: str = "") -> Check:
    """Whether the program is there, and runs when `argument` makes it tell its version (envd is the guest's: it does not)."""
    try:
        path = native.program(name)
    except HostNotReady as error:
        return Check(name, "fail", error.message, error.hint)
    if not argument:
        return Check(name, "ok", str(path))
    cure = "build it anew with `make setup`, or install the wheel again"
    try:
        done = subprocess.run([path, argument], capture_output=True, text=True, timeout=VERSION_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, "fail", f"{path} cannot be run: {error}", cure)
    words = done.stdout.split()
    if done.returncode != 0 or not words:
        return Check(name, "fail", f"{path} does not tell its version (status {done.returncode}): {done.stderr.strip()[:200]}", cure)
    return Check(name, "ok", " ".join(words))


def _blockd(config: Config) -> Check:
    """The program, and whether a running one speaks our protocol."""
    check = _native("blockd", "version")
    socket = node_paths(config).blockd_socket
    if check.status != "ok" or not socket.exists():
        return check
    try:
        info = asyncio.run(_blockd_info(socket))
    except AgentEnvError as error:
        return Check(
            "blockd", "warn", f"{check.detail}; {error.message}", "a running server starts it again by itself, else `aenv up` does"
        )
    if info.get("protocol") != PROTOCOL:
        detail = f"{check.detail}; the running one (pid {info.get('pid')}) speaks protocol {info.get('protocol')}, this version {PROTOCOL}"
        return Check("blockd", "fail", detail, "`aenv down`, then `aenv up`")
    exports = info.get("exports")
    disks = "block devices (ublk)" if isinstance(exports, list) and "ublk" in exports else f"files (FUSE): {info.get('no_ublk')}"
    return Check("blockd", "ok", f"{check.detail}; running (pid {info.get('pid')}, protocol {PROTOCOL}); disks are {disks}")


async def _blockd_info(socket: Path) -> dict[str, object]:
    client = BlockClient(socket)
    try:
        return await client.info()
    finally:
        await client.close()


def _vmm(config: Config) -> Check:
    """What VMs run on, and what keeps them off Firecracker."""
    from agentenv.vmm.choice import choose, find_firecracker

    try:
        found = choose(config.vmm)
    except AgentEnvError as error:
        return Check("vmm", "fail", error.message, error.hint)
    if found is not None:
        return Check("vmm", "ok", f"Firecracker {found.version}, jailed")
    qemu = _qemu(config)
    if config.vmm.driver == "qemu":
        return qemu
    try:
        find_firecracker(config.vmm)
        why = "setting vmm.accelerator is tcg"
    except AgentEnvError as error:
        why = error.message
    return replace(qemu, detail=f"{qemu.detail} ({why})")


def _qemu(config: Config) -> Check:
    from agentenv.vmm.qemu_install import host_qemu

    own = config.vmm.qemu
    if own and not shutil.which(own):
        return Check("qemu", "fail", f"setting vmm.qemu names {own}, which cannot be run", "mend the setting, or leave it empty")
    try:
        found = host_qemu()
        return Check("qemu", "ok", f"the host's, version {found.version}")
    except AgentEnvError as error:
        return _packaged_qemu(config, error.message)


def _packaged_qemu(config: Config, why_not_host: str) -> Check:
    folder = node_paths(config).cache / "assets"
    cached = sorted(entry.name for entry in folder.glob("qemu-*") if entry.is_dir())
    if cached:
        return Check("qemu", "ok", f"packaged: {', '.join(cached)}")
    return Check("qemu", "warn", f"none yet ({why_not_host})", "`aenv up` fetches a fit one")


def _server(config: Config) -> Check:
    record = read_record(config)
    host, port = config.api.host, config.api.port
    if record is not None and record.is_alive():
        found = troubles(config)
        if found:
            return Check(
                "server", "warn", f"running (pid {record.pid}), but {'; '.join(found.values())}", "see the logs below node.home/log"
            )
        if found is not None:
            return Check("server", "ok", f"running: {node_url(config)} (pid {record.pid})")
        return Check(
            "server", "fail", f"runs (pid {record.pid}) but does not answer on {node_url(config)}", "`aenv down`, then `aenv up --detach`"
        )
    if port_is_free(host, port):
        return Check("server", "ok", f"not running; port {port} on {host} is free (aenv {__version__})")
    holder = describe_holder(port) or "another program"
    return Check(
        "server",
        "fail",
        f"not running, and port {port} on {host} is in use by {holder}",
        "end it, or choose another port: `aenv up --port N`",
    )
