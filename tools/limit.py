"""The limit: the least that a restore can cost here, measured by a script without a product around it.

It restores the template's own snapshot with the bare VMM, from flat files, on a tap made before the clock starts, and
asks envd directly for the first output of a command. What the product takes on top is its own overhead; the two are
measured in turn, in one run.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from agentenv.config.schema import Config
from agentenv.core.built_in import BASE
from agentenv.core.model import Snapshot, Template
from agentenv.core.templates import build_of
from agentenv.guest.client import ENVD_PORT
from agentenv.guest.commands import connect_frame
from agentenv.host import native, netns
from agentenv.network.layout import GUEST_IP, GUEST_MAC, TAP, Layout, Slot
from agentenv.network.slots import create, destroy
from agentenv.snapshot.capture import state_file
from agentenv.vmm.choice import qemu_settings
from agentenv.vmm.driver import VmSpec
from agentenv.vmm.qemu import QemuSettings, command_line
from agentenv.wiring import ensure_assets, paths_of

_CHUNK_BYTES = 1 << 20
_ATTEMPT_S = 1.0
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Bare:
    """A snapshot as flat files, and a network for it. `close` it."""

    settings: QemuSettings
    snapshot: Snapshot
    state: Path
    folder: Path
    slot: Slot

    def close(self) -> None:
        """Remove the files and the network."""
        destroy(self.slot.namespace, self.slot.veth)
        shutil.rmtree(self.folder, ignore_errors=True)


def for_node(config: Config) -> Bare:
    """The limit for the base template of a node whose server may be up or down (its files are only read)."""
    paths, assets = paths_of(config), ensure_assets(config, lambda *_: None)
    with sqlite3.connect(f"file:{paths.database}?mode=ro", uri=True) as database:
        made = [TypeAdapter(Template).validate_json(body) for (body,) in database.execute("SELECT body FROM templates")]
        build = build_of(next(template for template in made if BASE in template.aliases), None)
        row = database.execute("SELECT body FROM snapshots WHERE snapshot_id = ?", (build.snapshot_id,)).fetchone()
    snapshot = TypeAdapter(Snapshot).validate_json(row[0])
    settings = qemu_settings(assets.vmm, config.vmm)
    state = state_file(paths, snapshot.snapshot_id)
    return prepare(native.program("blockd"), settings, snapshot, paths.layers, state, paths.cache / "bare")


def prepare(blockd: Path, settings: QemuSettings, snapshot: Snapshot, layers: Path, state: Path, folder: Path) -> Bare:
    """Flatten a snapshot into `folder` and make a network slot of its own (tag `bare`)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, ids in (("memory", snapshot.memory_layers), ("disk", snapshot.disk_layers)):
        config = folder / f"{name}.json"
        config.write_text(json.dumps({"lowers": [{"file": str(layers / f"{layer}.lsmt")} for layer in ids]}))
        _flatten([str(blockd), "cat", str(config)], folder / f"{name}.img")
    slot = Layout("10.118.0.0/30", "bare").slot(0)
    destroy(slot.namespace, slot.veth)
    create(slot, ())
    return Bare(settings, snapshot, state, folder, slot)


def _flatten(command: list[str], target: Path) -> None:
    """Write a program's output to a sparse file."""
    zeros = bytes(_CHUNK_BYTES)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as source, target.open("wb") as out:
        if source.stdout is None:
            raise RuntimeError("no pipe")
        size = 0
        while chunk := source.stdout.read(_CHUNK_BYTES):
            size += len(chunk)
            if chunk == zeros[: len(chunk)]:
                out.seek(len(chunk), os.SEEK_CUR)
            else:
                out.write(chunk)
        out.truncate(size)
    if source.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with status {source.returncode}")


def restore_and_run(bare: Bare, command: str) -> float:
    """Restore once and run `command`; returns the milliseconds from nothing to its first output."""
    return restore_and_measure(bare, command)[0]


def restore_and_measure(bare: Bare, command: str) -> tuple[float, float]:
    """Restore once and run `command`; the milliseconds from nothing to its first output, and those of CPU that the VMM took for it."""
    work = bare.folder / "vm"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    spec = VmSpec("bare", work, bare.snapshot.machine, bare.folder / "memory.img", _fresh_disk(bare), bare.slot.namespace, TAP, GUEST_MAC)
    argv = [*command_line(bare.settings, spec), "-incoming", f"file:{bare.state}"]
    began = time.perf_counter()
    with netns.entered(bare.slot.namespace):
        vm = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_running(work / "qmp.sock")
        _first_output(bare, command)
        took_ms = 1000 * (time.perf_counter() - began)
        return took_ms, 1000 * time.clock_gettime(_cpu_clock(vm.pid))
    finally:
        vm.kill()
        vm.wait()


def _cpu_clock(pid: int) -> int:
    """The clock of the CPU time that all threads of a process have taken, as clock_getcpuclockid(3) makes it."""
    return (~pid << 3) | 2


def _wait_until_running(monitor: Path) -> None:
    """Until the guest runs a packet to it is lost, and is sent again only after a second."""
    end = time.monotonic() + _DEADLINE_S
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(str(monitor))
                lines = sock.makefile("rw")
                lines.readline()
                for command in ("qmp_capabilities", *["query-status"] * 100_000):
                    lines.write(json.dumps({"execute": command}) + "\n")
                    lines.flush()
                    while "return" not in (reply := json.loads(lines.readline())):
                        pass
                    if reply["return"].get("running"):
                        return
                    time.sleep(0.001)
            except OSError:
                time.sleep(0.001)
    sys.exit("the bare VM did not start")


def _fresh_disk(bare: Bare) -> Path:
    """A copy of the disk for this run alone, made before the clock starts."""
    disk = bare.folder / "run.img"
    subprocess.run(["cp", "--sparse=always", str(bare.folder / "disk.img"), str(disk)], check=True)
    return disk


def _first_output(bare: Bare, command: str) -> None:
    message = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}, "stdin": False}).encode()
    body = connect_frame(message)
    user = base64.b64encode(b"user:").decode()
    head = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: {GUEST_IP}\r\nContent-Type: application/connect+json\r\n"
        f"Connect-Protocol-Version: 1\r\nAuthorization: Basic {user}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    end = time.monotonic() + _DEADLINE_S
    while time.monotonic() < end:
        sock = netns.tcp_socket(bare.slot.namespace)
        sock.settimeout(_ATTEMPT_S)
        try:
            with sock:
                sock.connect((GUEST_IP, ENVD_PORT))
                sock.sendall(head.encode() + body)
                sock.settimeout(_DEADLINE_S)
                if _read_until(sock, b'"stdout"'):
                    return
        except OSError:
            time.sleep(0.003)
    sys.exit("the bare VM did not answer")


def _read_until(sock: socket.socket, needle: bytes) -> bool:
    seen = b""
    while needle not in seen:
        part = sock.recv(65536)
        if not part:
            return False
        seen += part
    return True
