"""Create to first output: ours, in turn with bare Firecracker that loads the same snapshot from flat files.

That one's tap was made before, and its envd is asked directly. Ours is measured once when a VM stands ready, as a node has it by default
for a template in use, and once right after that, when none does and the next one is being made.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figure import Figure
from vmms import cpu_ticks, vmm_pids

from agentenv.block.client import BlockClient
from agentenv.core.paths import NodePaths
from agentenv.guest.client import ENVD_PORT
from agentenv.guest.commands import connect_frame
from agentenv.host import netns
from agentenv.network.layout import GUEST_IP, TAP, Layout, Slot
from agentenv.network.slots import create, destroy

COMMAND = "echo first"
ROUNDS = 5
READY_S, STILL_S = 120, 2
DEADLINE_S = 60.0
_POLL_S = 0.001


@dataclass(frozen=True)
class Bare:
    """The snapshot of `base` as flat files, and a network for it."""

    firecracker: Path
    folder: Path
    state: Path
    slot: Slot


def prepare_bare(here: Path, paths: NodePaths) -> Bare:
    """Flatten the snapshot that creates start from."""
    folder = here / "bare"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with sqlite3.connect(f"file:{paths.database}?mode=ro", uri=True) as database:
        templates = [json.loads(body) for (body,) in database.execute("SELECT body FROM templates")]
        base = next(template for template in templates if "base" in template["aliases"])
        tag = next(tag for tag in base["tags"] if tag["tag"] == "default")
        build = next(build for build in base["builds"] if build["build_id"] == tag["build_id"])
        query = "SELECT body FROM snapshots WHERE snapshot_id = ?"
        snapshot = json.loads(database.execute(query, (build["snapshot_id"],)).fetchone()[0])
    asyncio.run(flatten(paths, snapshot, folder))
    slot = Layout("10.153.0.0/30", "bare").slot(0)
    destroy(slot.namespace, slot.veth)
    create(slot, ())
    return Bare(here / "firecracker", folder, paths.snapshot(build["snapshot_id"]) / "vm.state", slot)


async def flatten(paths: NodePaths, snapshot: dict[str, Any], folder: Path) -> None:
    """Copy its memory and its disk out of `blockd`, with their holes."""
    blocks = BlockClient(paths.blockd_socket)
    for name in ("memory", "disk"):
        lowers = [paths.layers / f"{layer}.lsmt" for layer in snapshot[f"{name}_layers"]]
        stack = await blocks.open(f"figures-{name}", lowers, None, None, "page", "fuse")
        await asyncio.to_thread(copy_data, stack.path, folder / name)
        await blocks.close_stack(f"figures-{name}", force=True)
    await blocks.close()


def copy_data(source: Path, target: Path) -> None:
    """A copy with the same holes: a disk of 8 GiB has some hundred MB of data."""
    with source.open("rb", buffering=0) as there, target.open("wb") as here:
        size, at = there.seek(0, os.SEEK_END), 0
        here.truncate(size)
        while at < size:
            try:
                at = os.lseek(there.fileno(), at, os.SEEK_DATA)
            except OSError:  # only a hole is left
                break
            end = os.lseek(there.fileno(), at, os.SEEK_HOLE)
            here.seek(at)
            while at < end:
                piece = os.pread(there.fileno(), min(1 << 20, end - at), at)
                here.write(piece)
                at += len(piece)


def bare_create_ms(bare: Bare) -> float:
    """Load it once; from nothing to the first output. Firecracker runs in a folder that has what a jail has."""
    root = bare.folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    shutil.copy2(bare.state, root / "state")
    for name in ("memory", "disk"):  # the disk is the same each time: copies would take minutes, and the command reads little of it
        os.link(bare.folder / name, root / name)
    script = f'mount --bind "{root}" /mnt; mount --rbind /dev /mnt/dev; exec chroot /mnt /firecracker --api-sock /api.sock'
    shutil.copy2(bare.firecracker, root / "firecracker")
    (root / "dev").mkdir()
    began = time.perf_counter()
    with netns.entered(bare.slot.namespace):
        command = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-euc", script]
        vm = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        load = {
            "snapshot_path": "/state",
            "mem_backend": {"backend_type": "File", "backend_path": "/memory"},
            "enable_diff_snapshots": True,
            "network_overrides": [{"iface_id": "net", "host_dev_name": TAP}],
            "resume_vm": True,
        }
        _ask(root / "api.sock", load)
        _first_output(bare.slot.namespace)
        return 1000 * (time.perf_counter() - began)
    finally:
        vm.kill()
        vm.wait()


def _ask(api: Path, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"PUT /snapshot/load HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(str(api))
            except OSError:
                time.sleep(_POLL_S)
                continue
            sock.sendall(head.encode() + content)
            reply = sock.recv(65536)
            assert b" 204 " in reply.partition(b"\r\n")[0], reply
            return
    raise AssertionError("bare Firecracker did not listen")


def _first_output(namespace: str) -> None:
    message = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", COMMAND]}, "stdin": False}).encode()
    body = connect_frame(message)
    head = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: {GUEST_IP}\r\nContent-Type: application/connect+json\r\n"
        f"Connect-Protocol-Version: 1\r\nAuthorization: Basic {base64.b64encode(b'user:').decode()}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        sock = netns.tcp_socket(namespace)
        sock.settimeout(DEADLINE_S)
        seen = b""
        try:
            with sock:
                sock.connect((GUEST_IP, ENVD_PORT))
                sock.sendall(head.encode() + body)
                while part := sock.recv(65536):
                    seen += part
                    if b'"stdout"' in seen:
                        return
        except OSError:
            time.sleep(_POLL_S)
    raise AssertionError("the guest of bare Firecracker did not answer")


def product_create_ms() -> float:
    """A create by the SDK, to the first output."""
    from e2b import Sandbox

    first: list[float] = []
    began = time.perf_counter()
    sandbox = Sandbox.create("base", timeout=600)
    try:
        sandbox.commands.run(COMMAND, on_stdout=lambda _: first.append(time.perf_counter()))
        return 1000 * (first[0] - began)
    finally:
        sandbox.kill()


def ready_vm(run: Path) -> None:
    """Wait until a VM stands ready: it is there, and uses no CPU."""
    end = time.monotonic() + READY_S
    before: dict[int, int] = {}
    while time.monotonic() < end:
        used = {pid: cpu_ticks(pid) for pid in vmm_pids(run)}
        if used and used == before:
            return
        before = used
        time.sleep(STILL_S)
    raise AssertionError(f"no VM stands ready after {READY_S} s")


def create_figures(here: Path, paths: NodePaths) -> Iterator[Figure]:
    """In turn, so that all meet the same machine."""
    bare = prepare_bare(here, paths)
    rounds = []
    try:
        for _ in range(3):  # a template is in use from the second create on
            product_create_ms()
        for _ in range(ROUNDS):
            ready_vm(paths.run)
            rounds.append((bare_create_ms(bare), product_create_ms(), product_create_ms()))
    finally:
        destroy(bare.slot.namespace, bare.slot.veth)
        shutil.rmtree(bare.folder, ignore_errors=True)
    limit, ready, other = (statistics.median(column) for column in zip(*rounds, strict=True))
    yield Figure("bare Firecracker: load to first output (median)", limit, "ms")
    yield Figure("create to first output, a VM stands ready (median)", ready, "ms")
    yield Figure("create to first output, a VM stands ready, of the limit", ready / limit, "times", most=1.25)
    yield Figure("the same right after another one, while the next VM is made (median)", other, "ms")
    yield Figure("the same right after another one, of the limit", other / limit, "times")
