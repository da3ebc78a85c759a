"""Disks of real guests that are overwritten, trimmed and filled (cases E)."""

from __future__ import annotations

import pytest
from e2b import Sandbox, SandboxException
from e2e_node import Node

MIB = 1 << 20
LIVE_MB = 64
#: What an upper may keep of garbage, and what the guest's own file system and programs write beside the file.
BESIDE_MB = 16 + 48
OVERWRITE = f"""
import os, random
rng = random.Random(int(os.environ["SEED"]))
file = os.open("/home/user/live", os.O_RDWR | os.O_CREAT)
blocks = {LIVE_MB} << 8
if os.fstat(file).st_size == 0:
    for _ in range({LIVE_MB}):
        os.write(file, os.urandom(1 << 20))
    os.fsync(file)
for number in range(blocks * int(os.environ["TIMES"])):
    os.pwrite(file, rng.randbytes(4096), rng.randrange(blocks) * 4096)
    if number % 4096 == 0:
        os.fsync(file)
os.fsync(file)
"""


def stored_mb(node: Node, box: Sandbox) -> float:
    """What the disk of a sandbox takes of the host's; not that of other sandboxes, which may be going away meanwhile."""
    (vm,) = [sandbox["vm"] for sandbox in node.records("sandboxes") if sandbox["sandbox_id"] == box.sandbox_id]
    layers = {vm["upper_layer"], *vm["disk_layers"]}
    return sum(path.stat().st_blocks for path in (node.home / "layers").iterdir() if path.name.split(".")[0] in layers) / 2048


def overwrite(box: Sandbox, times: int, seed: int) -> str:
    """Write all of the file that many times over, block by block in no order; returns its checksum."""
    box.commands.run("python3 overwrite.py", envs={"TIMES": str(times), "SEED": str(seed)}, timeout=900)
    return box.commands.run("sha256sum live", timeout=120).stdout.split()[0]


def test_a_guest_that_overwrites_its_files_for_ever_does_not_fill_the_host(node):
    """E08 by the sixteenth: 64 MiB, written over at random six times; then trimmed, if its disk can be; and again after a pause."""
    box = Sandbox.create("base", timeout=3600, **node.options)
    before = stored_mb(node, box)
    box.files.write("overwrite.py", OVERWRITE)
    overwrite(box, 6, 1)
    grown = stored_mb(node, box) - before
    assert LIVE_MB <= grown <= LIVE_MB * 1.2 + BESIDE_MB, f"{grown:.0f} MiB for {LIVE_MB}"
    if int(box.commands.run("cat /sys/block/vda/queue/discard_max_bytes").stdout):  # Firecracker's disks have no discard
        box.commands.run("rm live && sync && sudo fstrim / && sync", timeout=300)
        trimmed = stored_mb(node, box) - before
        assert grown - trimmed >= 0.9 * LIVE_MB, f"{grown:.0f} MiB, and {trimmed:.0f} after a trim"
    overwrite(box, 1, 2)
    box.pause()
    box.connect(timeout=3600)
    paused = stored_mb(node, box)
    wanted = overwrite(box, 3, 3)
    grown = stored_mb(node, box) - paused
    assert grown <= LIVE_MB * 1.2 + BESIDE_MB, f"{grown:.0f} MiB after a pause"
    box.commands.run("echo 3 | sudo tee /proc/sys/vm/drop_caches")
    assert box.commands.run("sha256sum live", timeout=120).stdout.split()[0] == wanted, "the disk does not hold what was written"
    box.kill()


def test_a_guest_whose_disk_is_full_goes_on(node):
    """E14: commands run, an upload says why it fails, pause and resume work, and what is removed can be used again."""
    box = Sandbox.create("base", timeout=3600, **node.options)
    free = int(box.commands.run("df --output=avail -B1 / | tail -1").stdout)
    box.commands.run(f"sudo fallocate -l {free - 8 * MIB} /big", timeout=120)
    box.commands.run("dd if=/dev/zero of=/rest bs=4096; sync", timeout=300, user="root")  # dd meets the end; sync ends well
    assert box.commands.run("df --output=avail / | tail -1").stdout.strip() == "0"
    for _ in range(2):
        assert box.commands.run("echo still here").stdout == "still here\n"
        with pytest.raises(SandboxException, match=r"(?i)space"):
            box.files.write("upload", b"x" * MIB)
        box.pause()
        box.connect(timeout=3600)
    box.commands.run("sudo rm /rest")
    box.files.write("upload", b"x" * MIB)
    assert box.commands.run("wc -c < upload").stdout.strip() == str(MIB)
    box.kill()
