"""A file lent to a process that has a root and mounts of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.core.errors import Internal, NotFound
from agentenv.host import mounts, process

_JAIL = """
mount -t tmpfs "$1" "$1"/root
mkdir "$1"/root/dev; : > "$1"/root/given
for place in bin lib lib64 usr proc; do [ -e /$place ] && mkdir -p "$1"/root/$place && mount --rbind /$place "$1"/root/$place; done
cd "$1"/root
mkdir old
pivot_root . old
umount -l old
cd /
echo ready
exec sleep 60
"""


@pytest.fixture
def jailed(root: None, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "vms" / "a vm" / "root").mkdir(parents=True)
    command = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-euc", _JAIL, "jail", str(tmp_path / "vms" / "a vm")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.wait()


def test_a_file_is_lent_and_taken_back_and_nobody_else_sees_it(jailed: subprocess.Popen[str], tmp_path: Path) -> None:
    ours, given = tmp_path / "ours", Path(f"/proc/{jailed.pid}/root/given")
    ours.write_text("ours")
    here = Path("/proc/self/mountinfo").read_text()
    namespace = Path("/proc/thread-self/ns/mnt").readlink()
    for _ in range(2):
        mounts.lend(jailed.pid, ours, "/given")
        assert given.read_text() == "ours"
        given.write_text("theirs")
        assert ours.read_text() == "theirs"
        mounts.take_back(jailed.pid, "/given")
        assert given.read_text() == ""
        ours.write_text("ours")
    assert Path("/proc/self/mountinfo").read_text() == here
    assert Path("/proc/thread-self/ns/mnt").readlink() == namespace
    with pytest.raises(Internal, match="unmount /given"):
        mounts.take_back(jailed.pid, "/given")


def test_what_cannot_be_lent_says_why(jailed: subprocess.Popen[str], tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    with pytest.raises(Internal, match="No such file"):
        mounts.lend(jailed.pid, ours, "/given")
    ours.touch()
    for target in ("/missing", "/dev/missing"):
        with pytest.raises(Internal, match=rf"mount .* at {target}.*No such file"):
            mounts.lend(jailed.pid, ours, target)
    before = len(list(Path("/proc/self/fd").iterdir()))
    jailed.kill()
    jailed.wait()
    with pytest.raises(NotFound):
        mounts.lend(jailed.pid, ours, "/given")
    mounts.take_back(jailed.pid, "/given")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_jailed_process_is_found_by_the_name_of_its_root(jailed: subprocess.Popen[str], tmp_path: Path) -> None:
    ticks = process.start_ticks(jailed.pid)
    assert Path(f"/proc/{jailed.pid}/cwd").readlink() == Path("/")
    found = process.working_below(tmp_path / "vms")
    assert found == {tmp_path / "vms" / "a vm": process.ProcessId(jailed.pid, ticks or 0)}
    assert process.working_below(tmp_path) == {}
