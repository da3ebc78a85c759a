"""Control groups over a tree of plain files, of both versions, and on this host's own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.core.quotas import Quotas
from agentenv.host.cgroup import ROOT, Cgroups, Share, set_oom_score

PID = 999_999_999  # no such process
SHARE = Share(768, Quotas(cpu_percent=150), vcpu_count=2)


@pytest.fixture(autouse=True)
def _folders_of_plain_files_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel removes a group's files with it."""
    real = Path.rmdir
    monkeypatch.setattr(Path, "rmdir", lambda self: shutil.rmtree(self) if self.is_relative_to(tmp_path) else real(self))


def unified(root: Path, offered: str = "cpuset cpu io memory pids") -> Cgroups:
    (root / "cgroup.controllers").write_text(offered)
    (root / "agentenv-1").mkdir()
    (root / "agentenv-1" / "cgroup.controllers").write_text(offered)
    return Cgroups("agentenv-1", root)


def split(root: Path) -> Cgroups:
    for controller in ("cpu", "memory", "pids", "blkio"):
        (root / controller).mkdir()
    return Cgroups("agentenv-1", root)


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_version_2_has_everything_in_one_group(tmp_path: Path) -> None:
    groups = unified(tmp_path)
    groups.open()
    assert groups.lacking == []
    assert (tmp_path / "agentenv-1" / "cgroup.subtree_control").read_text().startswith("+")
    groups.put("a-1", PID, SHARE)
    assert files(tmp_path / "agentenv-1" / "a-1") == {
        "cgroup.procs": str(PID),
        "cpu.max": "150000 100000",
        "cpu.weight": "200",
        "memory.max": str(768 << 20),
        "memory.oom.group": "1",
        "pids.max": "256",
    }
    groups.put("b-1", PID, Share(0))
    assert files(tmp_path / "agentenv-1" / "b-1")["cpu.max"] == "max 100000"
    assert files(tmp_path / "agentenv-1" / "b-1")["memory.max"] == "max"


def test_version_1_has_a_group_for_each_controller_and_says_what_it_lacks(tmp_path: Path) -> None:
    groups = split(tmp_path)
    groups.open()
    assert groups.lacking == ["control groups are version 1"]
    groups.put("a-1", PID, SHARE)
    found = {c: files(tmp_path / c / "agentenv-1" / "a-1") for c in ("cpu", "memory", "pids")}
    assert found == {
        "cpu": {"cgroup.procs": str(PID), "cpu.cfs_quota_us": "150000", "cpu.shares": "2048"},
        "memory": {"cgroup.procs": str(PID), "memory.limit_in_bytes": str(768 << 20)},
        "pids": {"cgroup.procs": str(PID), "pids.max": "256"},
    }
    assert not groups.reclaim("a-1", 1 << 20)


def test_a_controller_that_the_host_does_not_offer_is_named(tmp_path: Path) -> None:
    groups = unified(tmp_path, "cpu io pids")
    groups.open()
    assert groups.lacking == ["the host does not offer memory"]


@pytest.mark.parametrize("make", [unified, split])
def test_groups_are_found_and_removed_by_name(tmp_path: Path, make: object) -> None:
    groups: Cgroups = make(tmp_path)  # type: ignore[operator]
    groups.open()
    for vm in ("a-1", "b-1", "c-1"):
        groups.put(vm, PID, SHARE)
    again = Cgroups("agentenv-1", tmp_path)
    assert again.present() == {"a-1", "b-1", "c-1"}
    again.keep_only({"b-1"})
    assert again.present() == {"b-1"}
    again.remove("b-1")
    again.remove("b-1")
    assert again.present() == set()
    again.close()
    assert not list(tmp_path.rglob("agentenv-1"))


def test_a_host_without_control_groups_is_no_error(tmp_path: Path) -> None:
    groups = Cgroups("agentenv-1", tmp_path)
    groups.open()
    groups.put("a-1", PID, SHARE)
    assert groups.lacking == ["no control groups"]
    assert groups.present() == set()
    assert groups.memory_bytes("a-1") is None
    assert not groups.killed_for_memory("a-1")
    groups.remove("a-1")
    groups.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "figure"), [("123456\n", 123456), ("", None), ("max", None)])
def test_what_a_group_holds(tmp_path: Path, text: str, figure: int | None) -> None:
    groups = unified(tmp_path)
    (tmp_path / "agentenv-1" / "a-1").mkdir()
    (tmp_path / "agentenv-1" / "a-1" / "memory.current").write_text(text)
    assert groups.memory_bytes("a-1") == figure


def test_a_process_of_this_host_is_limited_in_the_kernels_own_words(root: None) -> None:
    """Whatever version this host has."""
    groups = Cgroups(f"agentenv-test-{os.getpid()}")
    assert groups.version, f"{ROOT} is not mounted"
    groups.open()
    child = subprocess.Popen(["sleep", "60"])
    try:
        groups.put("a-1", child.pid, Share(64, Quotas(cpu_percent=50)))
        assert f"/agentenv-test-{os.getpid()}/a-1" in Path(f"/proc/{child.pid}/cgroup").read_text()
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() == "500"
        folder = ROOT / groups._name if groups.version == 2 else ROOT / "cpu" / groups._name
        quota = "cpu.max" if groups.version == 2 else "cpu.cfs_quota_us"
        assert (folder / "a-1" / quota).read_text().split()[0] == "50000"
        with pytest.raises(OSError, match="busy"):
            groups.remove("a-1")
    finally:
        child.kill()
        child.wait()
        groups.close()
    assert not folder.exists()


@pytest.mark.parametrize(("taken_mb", "dies"), [(16, False), (256, True)])
def test_whom_the_kernel_kills_for_want_of_memory_is_known(root: None, taken_mb: int, dies: bool) -> None:
    groups = Cgroups(f"agentenv-test-{os.getpid()}")
    groups.open()
    program = f"input(); taken = b'x' * ({taken_mb} << 20)"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        groups.put("a-1", child.pid, Share(64))
        assert not groups.killed_for_memory("a-1")
        child.communicate(b"\n", timeout=60)
        assert child.returncode == (-signal.SIGKILL if dies else 0)
        assert groups.killed_for_memory("a-1") is dies
    finally:
        child.kill()
        child.wait()
        groups.close()


def test_the_kernel_takes_whom_it_is_told_first() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        set_oom_score(child.pid, 300)
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "300\n"
    finally:
        child.kill()
        child.wait()
    set_oom_score(child.pid, 300)  # gone: no error
