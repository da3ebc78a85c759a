"""Pausing the disk alone and booting from it, through the official SDK: files stay, everything else starts anew."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest
from e2b import Sandbox, SandboxState
from e2b.exceptions import GuestUnresponsiveException, ServiceBusyException, TimeoutException
from guest_programs import PATIENCE_S, start_counter

BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
#: Writes numbered blocks with fsync and tells each that is down; what it told must be there after the pause.
WRITER = """
import os, sys
file = os.open(f"/home/user/synced-{sys.argv[1]}", os.O_CREAT | os.O_WRONLY)
number = 0
while True:
    os.pwrite(file, number.to_bytes(4096, "big"), 4096 * number)
    os.fsync(file)
    print(number, flush=True)
    number += 1
"""


def facts(sandbox: Sandbox) -> dict[str, str]:
    """What must be the same after a boot."""
    lines = sandbox.commands.run("hostname; echo $E2B_SANDBOX_ID; echo $GIVEN; id -un; pwd; cat /run/e2b/.E2B_SANDBOX_ID").stdout
    return dict(zip(("hostname", "id", "given", "user", "folder", "fact"), lines.split(), strict=True))


def detail(node, sandbox_id: str) -> dict:
    request = urllib.request.Request(f"{node.url}/sandboxes/{sandbox_id}", headers={"X-API-KEY": node.variables["E2B_API_KEY"]})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


@pytest.fixture
def made(node):
    """A sandbox with something to keep of each kind."""
    sandbox = Sandbox.create("base", timeout=600, envs={"GIVEN": "value"}, metadata={"a": "b"}, **node.options)
    yield sandbox
    sandbox.kill()


def test_files_stay_and_processes_go(node, made):
    before, boot_id, token = facts(made), made.commands.run(BOOT_ID).stdout, detail(node, made.sandbox_id)["envdAccessToken"]
    start_counter(made)
    made.files.write("/home/user/kept", "kept")
    made.commands.run("head -c 20000000 /dev/urandom > big; sha256sum big > sum; echo gone > /dev/shm/gone")
    made.pause(mode="filesystem")
    shown = detail(node, made.sandbox_id)
    assert (shown["state"], shown["pauseMode"]) == ("paused", "filesystem")
    assert not made.is_running()
    resumed = Sandbox.connect(made.sandbox_id, timeout=600, **node.options)
    assert resumed.commands.run(BOOT_ID).stdout != boot_id
    assert facts(resumed) == before
    assert detail(node, made.sandbox_id)["envdAccessToken"] == token
    assert detail(node, made.sandbox_id)["metadata"] == {"a": "b"}
    assert resumed.files.read("/home/user/kept") == "kept"
    assert resumed.commands.run("sha256sum -c sum; ls /dev/shm").stdout == "big: OK\n"
    assert [process for process in resumed.commands.list() if "count" in " ".join(process.args)] == []
    assert resumed.commands.run("sudo dmesg | grep -ci 'ext4.*recovery\\|ext4.*error' || true").stdout.strip() == "0"


def test_every_synced_block_is_there_and_the_file_system_is_clean(node, made):
    told: list[int] = [-1] * 4
    made.files.write("/home/user/writer.py", WRITER)
    handles = [made.commands.run(f"python3 writer.py {n}", background=True, timeout=0) for n in range(4)]
    end = time.monotonic() + 60
    for number, handle in enumerate(handles):
        for out, _err, _pty in handle:
            told[number] = int((out or "0").split()[-1])
            if told[number] >= 5 or time.monotonic() > end:
                break
    made.pause(mode="filesystem")
    resumed = Sandbox.connect(made.sandbox_id, timeout=600, **node.options)
    for number, last in enumerate(told):
        assert last >= 5, "the writers were too slow to say anything"
        check = f"""
import sys
data = open("/home/user/synced-{number}", "rb").read()
assert len(data) >= 4096 * {last + 1}, len(data)
assert all(int.from_bytes(data[4096 * n:4096 * n + 4096], "big") == n for n in range({last + 1}))
"""
        resumed.files.write("/home/user/check.py", check)
        assert resumed.commands.run("python3 check.py").exit_code == 0
    assert "clean" in resumed.commands.run("sudo dumpe2fs -h /dev/vda 2>/dev/null | grep 'Filesystem state'").stdout
    assert resumed.commands.run("sudo dmesg | grep -ci 'recovery\\|orphan' || true").stdout.strip() == "0"


def test_kinds_of_pause_and_of_resume_may_alternate(node, made):
    boots = [made.commands.run(BOOT_ID).stdout]
    for mode, on_resume, stays in (("full", "reboot", False), ("full", "restore", True), ("filesystem", "restore", False)):
        made.commands.run(f"echo {mode} {on_resume} >> story; sync")
        made.pause(mode=mode)
        Sandbox.connect(made.sandbox_id, timeout=600, on_resume=on_resume, **node.options)
        boots.append(made.commands.run(BOOT_ID).stdout)
        assert (boots[-1] == boots[-2]) == stays, f"paused {mode}, resumed by {on_resume}"
    assert made.commands.run("cat story").stdout == "full reboot\nfull restore\nfilesystem restore\n"


def test_a_pause_at_the_timeout_may_keep_the_disk_alone(node):
    policy = {"on_timeout": {"action": "pause", "mode": "filesystem"}}
    sandbox = Sandbox.create("base", timeout=600, lifecycle=policy, **node.options)
    try:
        sandbox.files.write("/home/user/kept", "kept")
        sandbox.set_timeout(0)
        info = sandbox.get_info()
        assert (info.state, detail(node, sandbox.sandbox_id)["pauseMode"]) == (SandboxState.PAUSED, "filesystem")
        (child,) = sandbox.fork(timeout=300)
        assert isinstance(child, Sandbox), child
        assert child.files.read("/home/user/kept") == "kept"
        assert child.commands.run("hostname").stdout.strip() == child.sandbox_id != sandbox.sandbox_id
        child.kill()
    finally:
        sandbox.kill()


def test_a_snapshot_of_the_disk_alone_leaves_its_source_running(node, made):
    boot_id = made.commands.run(BOOT_ID).stdout
    made.files.write("/home/user/kept", "kept")
    snapshot = made.create_snapshot(mode="filesystem")
    made.files.write("/home/user/after", "its files are not frozen")
    assert made.commands.run(BOOT_ID).stdout == boot_id
    other = Sandbox.create(snapshot.snapshot_id, timeout=600, **node.options)
    try:
        assert other.files.read("/home/user/kept") == "kept"
        assert not other.files.exists("/home/user/after")
        assert other.commands.run(BOOT_ID).stdout != boot_id
        assert other.commands.run("hostname").stdout.strip() == other.sandbox_id
    finally:
        other.kill()
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **node.options)


def test_a_guest_that_does_not_answer(node, made):
    """Its root cuts it off: refused when it must answer, and its memory is never brought back."""
    made.files.write("/home/user/kept", "kept")
    with pytest.raises(TimeoutException):  # the command's own end cannot be told any more
        made.commands.run("sync; sudo ip link set eth0 down", timeout=PATIENCE_S)
    with pytest.raises(ServiceBusyException):
        made.pause(strict=True, retries=0)
    assert detail(node, made.sandbox_id)["state"] == "running"
    made.pause()
    assert detail(node, made.sandbox_id)["envdUnresponsiveAtPause"] is True
    with pytest.raises(GuestUnresponsiveException):
        Sandbox.connect(made.sandbox_id, timeout=600, **node.options)
    resumed = Sandbox.connect(made.sandbox_id, timeout=600, on_resume="reboot", **node.options)
    assert resumed.files.read("/home/user/kept") == "kept"
