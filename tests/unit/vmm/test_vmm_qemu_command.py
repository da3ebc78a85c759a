"""How QEMU is started for a disk that is a file, and for one that is a block device."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agentenv.core.model import Machine
from agentenv.vmm.driver import VmSpec
from agentenv.vmm.qemu import QemuSettings, command_line


@pytest.mark.parametrize(("kind", "cache"), [(stat.S_IFREG, "writeback"), (stat.S_IFBLK, "none")])
def test_a_block_device_is_used_past_the_page_cache(tmp_path: Path, kind: int, cache: str) -> None:
    disk = tmp_path / "disk"
    os.mknod(disk, kind | 0o600, os.makedev(7, 250))
    spec = VmSpec("vm", tmp_path, Machine(1, 128, 1024), tmp_path / "memory", disk, "ns", "tap0", "02:00:00:00:00:01")
    line = command_line(QemuSettings(("qemu",), "10.0.2", "tcg", 1, 64), spec, "ringbuf,size=65536")
    [drive] = [word for word in line if word.startswith("id=root")]
    assert f"cache={cache}" in drive.split(",")
    assert f"file={disk}" in drive.split(",")
