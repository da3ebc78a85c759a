"""What a jail shows: tried for real, with a stand-in for Firecracker's jailer that looks around instead."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from agentenv.core.errors import NotFound
from agentenv.host import netns
from agentenv.vmm import jail
from agentenv.vmm.jail import Jail

LOOK = """#!/bin/sh
while [ "$1" != --chroot-base-dir ]; do shift; done
cd "$2"/firecracker/*/root
stat -c '%n %u %a %F' *
cat kernel
echo changed > capture
echo changed > kernel || echo kernel is read-only
dd if=/dev/zero of=filler bs=1M count=64 2>&1 | grep -o 'No space left'
"""


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(netns, "ROOT", tmp_path / "netns")
    (tmp_path / "netns").mkdir()
    (tmp_path / "netns" / "one").touch()
    (tmp_path / "netns" / "two").touch()
    return "one"


def test_a_jail_has_what_it_was_given_and_nothing_of_it_is_left(tmp_path: Path, namespace: str) -> None:
    (tmp_path / "jailer").write_text(LOOK)
    (tmp_path / "jailer").chmod(0o755)
    for name in ("kernel", "memory-layer"):
        (tmp_path / name).write_text(f"this is the {name}\n")
    device = tmp_path / "device"
    os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(7, 250))
    files = ((tmp_path / "kernel", "kernel", False), (device, "disk", True), (tmp_path / "memory-layer", "capture", True))
    work = tmp_path / "work"
    subject = Jail(tmp_path / "firecracker", tmp_path / "jailer", "vm-1", work, namespace, files)
    subject.folder.mkdir(parents=True)
    done = subprocess.run(subject.command(), capture_output=True, text=True, check=False, timeout=30)
    lines = done.stdout.splitlines()
    user = jail.user_of(namespace)
    assert f"disk {user} 600 block special file" in lines, done
    assert any(line.startswith("kernel 0 ") for line in lines)
    assert "this is the kernel" in lines
    assert "kernel is read-only" in lines
    assert "No space left" in lines
    assert (tmp_path / "kernel").read_text() == "this is the kernel\n"
    assert (tmp_path / "memory-layer").read_text() == "changed\n"
    assert list(subject.folder.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def test_each_namespace_has_a_user_of_its_own(namespace: str) -> None:
    users = {jail.user_of("one"), jail.user_of("two")}
    assert len(users) == 2
    assert all(1000 < user < 1 << 31 for user in users)
    assert jail.GROUP not in users
    with pytest.raises(NotFound):
        jail.user_of("three")
