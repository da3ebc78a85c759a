"""The Firecracker driver as a node uses it: jailed, on ublk devices of `blockd`, in real network slots, with our guest agent inside.

    boot -> save -> two at once from the same layers -> save one again -> go on from that -> kill blockd under a running guest

Run by `inside.py`; needs what `run.py` brings along. Prints figures of this host, which is usually an emulated one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from emulated import cpu_template

from agentenv.block import supervisor
from agentenv.block.client import BlockClient, Upper
from agentenv.core.clock import SystemClock
from agentenv.core.model import Machine
from agentenv.guest.client import GuestClient, GuestIdentity
from agentenv.network.layout import GUEST_IP, GUEST_MAC, TAP, Layout, Slot, boot_settings
from agentenv.network.slots import SlotPool
from agentenv.vmm.driver import BootSpec, MemoryFile, VmSpec
from agentenv.vmm.firecracker import FirecrackerDriver, FirecrackerSettings, FirecrackerVm, installed_version
from agentenv.vmm.firecracker_requests import CpuTemplate, RateLimits
from agentenv.vmm.jail import user_of

MACHINE = Machine(1, 256, 128)
DEADLINE_S = 120.0
LIMITS = RateLimits(network_bytes=64 << 20)
PROGRAMS = ("sh", "cat", "sleep", "sync", "mkdir", "mount", "dd", "md5sum")
CHANGED_MOST_BYTES = 64 << 20
"""A guest that did little since it was loaded has changed far less than its memory."""


@dataclass(frozen=True)
class Saved:
    """A saved VM: its state, and its layers, bottom first."""

    state: Path
    memory: tuple[Path, ...]
    disk: tuple[Path, ...]


@dataclass
class Lab:
    """A small node: a block server, a driver and a pool of slots."""

    folder: Path
    blocks: BlockClient
    driver: FirecrackerDriver
    slots: SlotPool
    guest: GuestClient
    running: list[FirecrackerVm] = field(default_factory=list)
    count: int = 0

    def layer(self, name: str) -> Upper:
        return Upper(self.folder / f"{name}.lsmt", self.folder / f"{name}.index")


@dataclass
class Running:
    """A VM with what it holds."""

    name: str
    vm: FirecrackerVm
    slot: Slot
    memory: tuple[Path, ...]

    async def run(self, lab: Lab, command: str) -> str:
        code, output = await lab.guest.run(self.slot.namespace, command, DEADLINE_S)
        assert code == 0, f"`{command}` in {self.name} ended with {code}: {output}"
        return output


async def start(lab: Lab, disk: tuple[Path, ...], saved: Saved | None, boot: BootSpec) -> Running:
    """A VM from a saved one, or booted; returns when its guest has its identity."""
    lab.count += 1
    name = f"vm-{lab.count}"
    slot = await lab.slots.acquire()
    memory = saved.memory if saved else ()
    root = await lab.blocks.open(f"disk-{name}", disk, lab.layer(f"disk-{name}"), None, "direct")
    assert root.path.is_block_device(), f"{root.path} is no ublk device"
    size_bytes = None if memory else MACHINE.memory_mb << 20
    owner = lab.driver.user(slot.namespace)
    await lab.blocks.open(f"capture-{name}", memory, lab.layer(f"memory-{name}"), size_bytes, "direct", "fuse", owner)
    mapped = Path("/nonexistent")
    if saved:
        mapped = (await lab.blocks.open(f"mem-{memory[-1].stem}", memory, None, None, "page", "ublk")).path
    spec = VmSpec(name, lab.folder / "vms" / name, MACHINE, mapped, root.path, slot.namespace, TAP, GUEST_MAC)
    spec.work.mkdir(parents=True)
    vm = await (lab.driver.restore(spec, saved.state) if saved else lab.driver.boot(spec, boot))
    lab.running.append(vm)
    running = Running(name, vm, slot, memory)
    await lab.guest.initialise(
        slot.namespace, GuestIdentity(name, "lab", "", default_user="root", default_workdir="/"), DEADLINE_S, boots=not saved
    )
    return running


async def save(lab: Lab, running: Running, name: str) -> Saved:
    """Save a running VM and end it."""
    state = lab.folder / f"{name}.state"
    await running.vm.pause()
    capture = next(stack for stack in await lab.blocks.stacks() if stack.stack_id == f"capture-{running.name}")
    await running.vm.save_state(state, MemoryFile(capture.path, is_whole=False))
    memory = await lab.blocks.seal(f"capture-{running.name}", lab.layer(f"unused-memory-{name}"))
    disk = await lab.blocks.seal(f"disk-{running.name}", lab.layer(f"unused-disk-{name}"))
    await end(lab, running)
    return Saved(state, memory.lowers, disk.lowers)


async def end(lab: Lab, running: Running) -> None:
    await running.vm.kill()
    lab.running.remove(running.vm)
    for kind in ("capture", "disk"):
        await lab.blocks.close_stack(f"{kind}-{running.name}", force=True)
    await lab.slots.release(running.slot.number)


def make_root(folder: Path) -> Path:
    """A root file system with a shell and a few programs of this host."""
    tree = folder / "tree"
    for name in ("bin", "dev", "proc", "sys", "run", "tmp", "root", "etc", "lib64"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        program = Path(shutil.which(name) or name).resolve()
        shutil.copy2(program, tree / "bin" / name)
        for line in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.splitlines():
            for word in (word for word in line.split() if word.startswith("/")):
                target = tree / word.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(word, target)
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tree / "etc/group").write_text("root:x:0:\n")
    image = folder / "root.ext4"
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-L", "root", "-d", tree, image, f"{MACHINE.disk_mb}M"], check=True)
    return image


def check_jail(running: Running) -> None:
    """The VMM has no privilege, a user of its own, and sees the files of its jail alone."""
    pid = running.vm.process.pid
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    user = str(user_of(running.slot.namespace))
    assert status["Uid"].split() == [user] * 4, status["Uid"]
    assert status["Groups"].split() == [], status["Groups"]
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0, status
    assert status["Seccomp"] == "2", status["Seccomp"]
    assert status["NoNewPrivs"] == "1", status["NoNewPrivs"]
    seen = sorted(path.name for path in Path(f"/proc/{pid}/root").iterdir())
    assert set(seen) <= {
        "api.sock",
        "capture",
        "dev",
        "disk",
        "firecracker",
        "firecracker.pid",
        "kernel",
        "initramfs",
        "memory",
        "run",
        "state",
    }, seen
    spaces = [Path(f"/proc/{who}/ns/{kind}").readlink() for kind in ("net", "mnt") for who in (pid, "self")]
    assert spaces[0] != spaces[1], spaces
    assert spaces[2] != spaces[3], spaces


async def scenario(lab: Lab, boot: BootSpec) -> None:
    """The whole story; each step asserts what it shows."""
    base = lab.folder / "base.lsmt"
    await lab.blocks.import_raw(await asyncio.to_thread(make_root, lab.folder), base)
    began = time.monotonic()
    first = await start(lab, (base,), None, boot)
    print(f"    boot to the guest's identity: {time.monotonic() - began:.1f} s", flush=True)
    check_jail(first)
    await first.run(
        lab, "echo kept > /root/kept; sync; (i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done) >/dev/null 2>&1 &"
    )
    snapshot = await save(lab, first, "first")
    assert [path.exists() for path in (first.vm._spec.work / "jail").glob("*")] == [], "the jail is left"

    began = time.monotonic()
    twins = await asyncio.gather(*(start(lab, snapshot.disk, snapshot, boot) for _ in range(2)))
    outputs = [await twin.run(lab, "cat /root/kept") for twin in twins]
    print(f"    two loads to first output: {time.monotonic() - began:.2f} s", flush=True)
    assert outputs == ["kept\n"] * 2, outputs
    one, other = twins
    for twin in twins:
        check_jail(twin)
    assert user_of(one.slot.namespace) != user_of(other.slot.namespace)
    count = int(await one.run(lab, "cat /tmp/count"))
    await asyncio.sleep(1)
    assert int(await one.run(lab, "cat /tmp/count")) > count, "the guest's process does not go on"
    await one.run(lab, "echo one > /root/who; dd if=/dev/urandom of=/root/noise bs=64k count=64 2>/dev/null; sync")
    noise = await one.run(lab, "md5sum /root/noise")
    assert await other.run(lab, "cat /root/who 2>/dev/null || echo nobody") == "nobody\n"

    second = await save(lab, one, "second")
    changed = second.memory[-1].stat().st_size
    print(f"    changed memory: {changed >> 20} MiB of {MACHINE.memory_mb}", flush=True)
    assert second.memory[:-1] == snapshot.memory
    assert 0 < changed < CHANGED_MOST_BYTES, changed
    again = await start(lab, second.disk, second, boot)
    assert await again.run(lab, "cat /root/who") == "one\n"
    assert int(await again.run(lab, "cat /tmp/count")) > count
    assert await again.run(lab, "md5sum /root/noise") == noise

    await kill_blockd(lab, again, noise)
    for running in (again, other):
        await end(lab, running)


async def kill_blockd(lab: Lab, running: Running, noise: str) -> None:
    """blockd is killed and started again while a guest writes: the guest waits, and then goes on with its data."""
    write = "dd if=/dev/urandom of=/root/w$i bs=4k count=16 2>/dev/null; sync"
    command = f"i=0; while [ $i -lt 40 ]; do {write}; i=$((i+1)); done; cat /root/w? | md5sum"
    writing = asyncio.create_task(running.run(lab, command))
    await asyncio.sleep(1)
    pid = int((await lab.blocks.info())["pid"])
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    await asyncio.sleep(1)
    again = await supervisor.ensure_running(Path("./blockd").absolute(), lab.folder / "run", lab.folder / "blockd.log")
    await again.close()
    expected = await writing
    print(f"    killed blockd to the end of the guest's writes: {time.monotonic() - killed:.1f} s", flush=True)
    await running.run(lab, "mount -t proc proc /proc 2>/dev/null; echo 3 > /proc/sys/vm/drop_caches")
    assert await running.run(lab, "cat /root/w? | md5sum") == expected
    assert await running.run(lab, "md5sum /root/noise") == noise


async def main(here: Path, folder: Path) -> None:
    """Set the node up, go through the story, and take it down."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    programs = (here / "firecracker", here / "jailer")
    settings = FirecrackerSettings(*programs, installed_version(*programs), "host", LIMITS, CpuTemplate(content=cpu_template()))
    blocks = await supervisor.ensure_running(here / "blockd", folder / "run", folder / "blockd.log")
    assert "ublk" in (await blocks.info())["exports"], await blocks.info()
    slots = SlotPool(Layout("10.150.0.0/16", "1ab0"), (), 2)
    await slots.open(())
    lab = Lab(folder, blocks, FirecrackerDriver(settings), slots, GuestClient(GUEST_IP, SystemClock()))
    boot = BootSpec(here / "vmlinux", here / "initramfs.cpio", f"aenv.root=/dev/vda aenv.rootfs=ext4 aenv.hostname=lab {boot_settings()}")
    try:
        await scenario(lab, boot)
    finally:
        for vm in lab.running:
            await vm.kill()
        await slots.close()
        await blocks.close()
        await supervisor.stop(folder / "run")
