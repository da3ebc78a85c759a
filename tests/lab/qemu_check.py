"""The portable driver on KVM with a disk that is a ublk device: what a node with KVM and ublk runs today.

    boot -> write -> seal the disk while it stands -> write on -> the sealed layer has the one and not the other

Run by `inside.py`; needs what `run.py` brings along.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from firecracker_check import DEADLINE_S, MACHINE, make_root

from agentenv.block import supervisor
from agentenv.block.client import BlockClient, Upper
from agentenv.core.clock import SystemClock
from agentenv.guest.client import GuestClient, GuestIdentity
from agentenv.host.tsc import tsc_khz
from agentenv.network.layout import GUEST_IP, GUEST_MAC, TAP, Layout, boot_settings
from agentenv.network.slots import SlotPool
from agentenv.vmm.driver import BootSpec, VmSpec
from agentenv.vmm.qemu import QemuDriver, QemuSettings
from agentenv.vmm.qemu_install import packaged_argv


async def scenario(here: Path, folder: Path, blocks: BlockClient, slots: SlotPool) -> None:
    """The whole story; each step asserts what it shows."""
    base, upper, fresh = (Upper(folder / f"{name}.lsmt", folder / f"{name}.index") for name in ("base", "upper", "fresh"))
    await blocks.import_raw(await asyncio.to_thread(make_root, folder), base.data)
    slot = await slots.acquire()
    memory = await blocks.open("mem-blank", (), None, MACHINE.memory_mb << 20, "page")
    disk = await blocks.open("disk", [base.data], upper, None, "direct")
    assert disk.path.is_block_device(), f"{disk.path} is no ublk device"
    guest = GuestClient(GUEST_IP, SystemClock())
    spec = VmSpec("qemu", folder / "vms" / "qemu", MACHINE, memory.path, disk.path, slot.namespace, TAP, GUEST_MAC)
    driver = QemuDriver(QemuSettings(packaged_argv(here / "qemu"), "10", "kvm", tsc_khz(), 64))
    boot = BootSpec(here / "vmlinux", here / "initramfs.cpio", f"aenv.root=/dev/vda aenv.rootfs=ext4 {boot_settings()}")
    vm = await driver.boot(spec, boot)

    async def run(command: str) -> str:
        code, output = await guest.run(slot.namespace, command, DEADLINE_S)
        assert code == 0, f"`{command}` ended with {code}: {output}"
        return output

    try:
        identity = GuestIdentity("qemu", "lab", "", default_user="root", default_workdir="/")
        await guest.initialise(slot.namespace, identity, DEADLINE_S, boots=True)
        await run("dd if=/dev/urandom of=/root/early bs=64k count=64 2>/dev/null; sync")
        early = await run("md5sum /root/early")
        await vm.pause()
        await vm.save_state(folder / "qemu.state")
        layers = (await blocks.seal("disk", fresh)).lowers
        await vm.resume()
        await run("echo later > /root/later; sync; mount -t proc proc /proc; echo 3 > /proc/sys/vm/drop_caches")
        assert await run("md5sum /root/early") == early
        assert layers == (base.data, upper.data), layers
    finally:
        await vm.kill()
        await blocks.close_stack("disk", force=True)
        await slots.release(slot.number)
    # What a fork of that instant would read, and what went on after it.
    for name, lowers, wanted in (("sealed", layers, False), ("all", layers, True)):
        opened = await blocks.open(name, lowers, fresh if wanted else None, None, "direct" if wanted else "page", "ublk")
        content = await asyncio.to_thread(opened.path.read_bytes)
        assert (b"later\n" in content) is wanted, name
        await blocks.close_stack(name, force=True)


async def main(here: Path, folder: Path) -> None:
    """Set block server and slots up, go through the story, and take them down."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    blocks = await supervisor.ensure_running(here / "blockd", folder / "run", folder / "blockd.log")
    slots = SlotPool(Layout("10.150.0.0/16", "1ab0"), (), 1)
    await slots.open(())
    try:
        await scenario(here, folder, blocks, slots)
    finally:
        await slots.close()
        await blocks.close()
        await supervisor.stop(folder / "run")
