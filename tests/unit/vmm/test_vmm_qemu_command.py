"""How QEMU is started for a disk that is a file, and for one that is a block device."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agentenv.core.model import Machine
from agentenv.core.quotas import NONE, Quotas
from agentenv.host import netns
from agentenv.vmm.driver import VmSpec
from agentenv.vmm.qemu import QemuDriver, QemuSettings, clock_arguments, command_line


@pytest.fixture(autouse=True)
def namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "ROOT", tmp_path / "netns")
    (tmp_path / "netns").mkdir()
    for name in ("ns", "other"):
        (tmp_path / "netns" / name).touch()


def line_of(tmp_path: Path, disk: Path, namespace: str = "ns", quotas: Quotas = NONE) -> list[str]:
    spec = VmSpec("vm", tmp_path, Machine(1, 128, 1024), tmp_path / "memory", disk, namespace, "tap0", "02:00:00:00:00:01", quotas)
    return command_line(QemuSettings(("qemu",), "10.0.2", "tcg", 1, 64), spec)


@pytest.mark.parametrize(("accelerator", "expected"), [("tcg", "tsc_early_khz=2400000 tsc=reliable"), ("kvm", "tsc_early_khz=2400000")])
def test_only_an_emulated_tsc_is_never_doubted(accelerator: str, expected: str) -> None:
    assert clock_arguments(QemuSettings(("qemu",), "10.0.2", accelerator, 2_400_000, 64)) == expected


@pytest.mark.parametrize(("accelerator", "counted_mb"), [("tcg", 512), ("kvm", 0)])
def test_translated_code_counts_where_there_is_some(accelerator: str, counted_mb: int) -> None:
    assert QemuDriver(QemuSettings(("qemu",), "10.0.2", accelerator, 1, 512)).code_cache_mb == counted_mb


@pytest.mark.parametrize("kind", [stat.S_IFREG, stat.S_IFBLK])
def test_a_disk_is_used_past_the_page_cache(tmp_path: Path, kind: int) -> None:
    disk = tmp_path / "disk"
    os.mknod(disk, kind | 0o600, os.makedev(7, 250))
    line = line_of(tmp_path, disk)
    [drive] = [word for word in line if word.startswith("id=root")]
    assert "cache=none" in drive.split(",")
    assert f"file={disk}" in drive.split(",")


@pytest.mark.parametrize(
    ("quotas", "words"),
    [
        (NONE, []),
        (Quotas(disk_bytes_per_s=1 << 20), ["throttling.bps-total=1048576"]),
        (Quotas(disk_bytes_per_s=1 << 20, disk_operations_per_s=50), ["throttling.bps-total=1048576", "throttling.iops-total=50"]),
    ],
)
def test_a_disk_is_as_fast_as_the_sandbox_may_use_it(tmp_path: Path, quotas: Quotas, words: list[str]) -> None:
    [drive] = [word for word in line_of(tmp_path, tmp_path / "disk", quotas=quotas) if word.startswith("id=root")]
    assert [word for word in drive.split(",") if word.startswith("throttling")] == words


def test_it_gives_up_being_root_and_its_view_of_the_host(tmp_path: Path) -> None:
    users = set()
    for namespace in ("ns", "other"):
        line = line_of(tmp_path, tmp_path / "disk", namespace)
        confined = dict(word.split("=", 1) for word in line[line.index("-run-with") + 1].split(","))
        assert confined["chroot"] == str(tmp_path)
        user, group = map(int, confined["user"].split(":"))
        assert user == group > 65536, "no user that could exist"
        users.add(user)
        assert line[line.index("-sandbox") + 1].startswith("on,")
        [drive] = [word for word in line if word.startswith("id=root")]
        assert "auto-read-only=off" in drive, "opened anew when it is written to first, by somebody who may not"
    assert len(users) == 2, "an escaped VMM must not be the user of another"
