"""Figures of a production node, from one run: each against what it is bounded by. Run by `node_check.py` on a node that is up.

    create: from the call to the first output of a command, in turn with bare Firecracker that loads the same snapshot from flat
            files, on a tap made before, and is asked straight at its envd
    disk:   4 KiB reads past the page cache, of the same layer as a ublk device and as a FUSE file
    memory: what a VMM takes beside its guest's memory; what idle sandboxes take in all of what they are configured to have

Prints a table, and writes `figures.json`. Exits with 1 when a bound is not held.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.block.client import BlockClient, Upper
from agentenv.config.load import load
from agentenv.core.paths import NodePaths
from agentenv.guest.client import ENVD_PORT
from agentenv.guest.commands import connect_frame
from agentenv.host import netns
from agentenv.network.layout import GUEST_IP, TAP, Layout, Slot
from agentenv.network.slots import create, destroy

COMMAND = "echo first"
ROUNDS = 5
READ_BYTES, READERS = 64 << 20, (1, 4)
IDLE_SANDBOXES, IDLE_S = 12, 30
DEADLINE_S = 60.0
_POLL_S = 0.001


@dataclass(frozen=True)
class Figure:
    """One measured value with its bound, if it has one: `least` or `most`."""

    name: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None

    @property
    def holds(self) -> bool:
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    def line(self) -> str:
        bound = f"at most {self.most:g}" if self.most is not None else f"at least {self.least:g}" if self.least is not None else ""
        return f"    {self.name:64} {self.value:10.2f} {self.unit:8} {bound} {'' if self.holds else '<- NOT HELD'}".rstrip()


# -- create


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


def create_figures(here: Path, paths: NodePaths) -> Iterator[Figure]:
    """In turn, so that both meet the same machine."""
    bare = prepare_bare(here, paths)
    try:
        bare_create_ms(bare)
        product_create_ms()
        pairs = [(bare_create_ms(bare), product_create_ms()) for _ in range(ROUNDS)]
    finally:
        destroy(bare.slot.namespace, bare.slot.veth)
        shutil.rmtree(bare.folder, ignore_errors=True)
    limit, product = (statistics.median(column) for column in zip(*pairs, strict=True))
    yield Figure("bare Firecracker: load to first output (median)", limit, "ms")
    yield Figure("create to first output (median)", product, "ms")
    yield Figure("create to first output, of the limit", product / limit, "times", most=1.25)


# -- disk


async def _opened(blocks: BlockClient, folder: Path, layer: Path, export: Any) -> Path:
    upper = Upper(folder / f"{export}.lsmt", folder / f"{export}.index")
    return (await blocks.open(f"figures-{export}", (layer,), upper, None, "direct", export)).path


async def disk_figures(here: Path, paths: NodePaths) -> list[Figure]:
    """Reads of a layer of random bytes, by programs that ask for one block after the other."""
    folder = here / "figures"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "raw").write_bytes(os.urandom(READ_BYTES))
    blocks = BlockClient(paths.blockd_socket)
    found = []
    try:
        await blocks.import_raw(folder / "raw", folder / "layer.lsmt")
        devices = {export: await _opened(blocks, folder, folder / "layer.lsmt", export) for export in ("fuse", "ublk")}
        for readers in READERS:
            rates = {export: await asyncio.to_thread(reads_per_s, path, readers) for export, path in devices.items()}
            found += [Figure(f"4 KiB reads, {readers} at a time: {export}", rate, "per s") for export, rate in rates.items()]
            least = 2.0 if readers == READERS[-1] else None
            found.append(Figure(f"4 KiB reads, {readers} at a time: ublk of FUSE", rates["ublk"] / rates["fuse"], "times", least=least))
    finally:
        for export in ("fuse", "ublk"):
            await blocks.close_stack(f"figures-{export}", force=True)
        await blocks.close()
        shutil.rmtree(folder)
    return found


def reads_per_s(path: Path, readers: int) -> float:
    """4 KiB reads past the page cache in a second, by so many programs."""
    count = READ_BYTES // 4096 // readers
    began = time.perf_counter()
    programs = [
        subprocess.Popen(
            ["dd", f"if={path}", "of=/dev/null", "bs=4k", "iflag=direct", f"count={count}", f"skip={number * count}", "status=none"]
        )
        for number in range(readers)
    ]
    assert all(program.wait(600) == 0 for program in programs), f"reads of {path} failed"
    return readers * count / (time.perf_counter() - began)


# -- memory


def vmm_pids(run: Path) -> list[int]:
    """The VMMs of the node."""
    from agentenv.host import process

    return [found.pid for found in process.working_below(run / "vms").values()]


def taken_kib(pid: int) -> tuple[int, int]:
    """What a VMM takes beside its guest's memory, and in all: PSS, which counts what is shared once in all, and its jail's files.

    The kernel's own (page tables, what KVM keeps of a VM) is not in it.
    """
    jail = os.statvfs(f"/proc/{pid}/root")
    beside = whole = (jail.f_blocks - jail.f_bfree) * jail.f_frsize >> 10  # its file system is in memory
    mapped = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapped = line.split()[5] if len(line.split()) > 5 else ""
        elif line.startswith("Pss:") and mapped != "/firecracker":  # which is in its jail
            kib = int(line.split()[1])
            whole += kib
            beside += 0 if mapped == "/memory" else kib
    return beside, whole


def memory_figures(paths: NodePaths) -> list[Figure]:
    """Idle sandboxes, each of which has run a command; then all are asked for something."""
    from e2b import Sandbox

    sandboxes = [Sandbox.create("base", timeout=3600) for _ in range(IDLE_SANDBOXES)]
    try:
        for sandbox in sandboxes:
            sandbox.commands.run("python3 -c 'print(1)' > /dev/null")
        time.sleep(IDLE_S)
        ids = {sandbox.sandbox_id for sandbox in sandboxes}
        configured_mb = sum(info.memory_mb for page in [Sandbox.list().next_items()] for info in page if info.sandbox_id in ids)
        taken = [taken_kib(pid) for pid in vmm_pids(paths.run)]
        woken = []
        for sandbox in sandboxes:
            began = time.perf_counter()
            sandbox.commands.run("true")
            woken.append(1000 * (time.perf_counter() - began))
    finally:
        for sandbox in sandboxes:
            sandbox.kill()
    resident_mb = sum(whole for _, whole in taken) / 1024
    total_mb = int(Path("/proc/meminfo").read_text().split()[1]) / 1024
    return [
        Figure("memory of a VMM beside its guest's (most of all)", max(beside for beside, _ in taken) / 1024, "MiB", most=8.0),
        Figure(f"idle sandboxes ({IDLE_SANDBOXES}, after a Python each): configured memory", configured_mb, "MiB"),
        Figure("memory of this machine", total_mb, "MiB"),
        Figure("memory they take in all, guests and VMMs", resident_mb, "MiB"),
        Figure("configured of taken", configured_mb / resident_mb, "times", least=10.0),
        Figure("a command in an idle one (median)", statistics.median(woken), "ms"),
        Figure("a command in an idle one (p99)", max(woken), "ms"),
    ]


def main(here: Path, results: Path) -> None:
    """Measure, print, write down; exits with 1 when a bound is not held."""
    config = load()
    paths = NodePaths(config.node.home.absolute(), config.node.run.absolute())
    parts: dict[str, Callable[[], list[Figure]]] = {
        "create": lambda: list(create_figures(here, paths)),
        "disk": lambda: asyncio.run(disk_figures(here, paths)),
        "memory": lambda: memory_figures(paths),
    }
    figures: list[Figure] = []
    for measure in parts.values():
        found = measure()
        print("\n".join(figure.line() for figure in found), flush=True)
        figures += found
    written = [{"name": f.name, "value": f.value, "unit": f.unit, "most": f.most, "least": f.least, "holds": f.holds} for f in figures]
    (results / "figures.json").write_text(json.dumps(written, indent=2))
    sys.exit(not all(figure.holds for figure in figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
