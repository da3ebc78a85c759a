"""The checks for production hosts, on made-up hosts: trees with the files of /proc, /sys and /dev that the checks read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.cli.node import load_config
from agentenv.host import production
from agentenv.host.production import Facts, production_checks
from agentenv.host.tuning import MODULES, SYSCTLS

GOOD = Facts(release="6.12.95-cloud-amd64", clock_state=0, open_files=1 << 20)
FILES = {
    "proc/cpuinfo": "flags : fpu vmx\n",
    "proc/mounts": "/dev/root / overlay rw 0 0\n/dev/vdb /var/lib ext4 rw 0 0\n",
    "proc/swaps": "Filename Type Size Used Priority\n",
    "proc/sys/vm/swappiness": "60\n",
    "proc/sys/vm/nr_hugepages": "0\n",
    "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/kernel/mm/ksm/run": "0\n",
    "sys/devices/system/cpu/smt/active": "0\n",
    "sys/devices/system/cpu/vulnerabilities/meltdown": "Not affected\n",
    "sys/devices/system/cpu/vulnerabilities/retbleed": "Mitigation: Enhanced IBRS\n",
    "sys/module/apparmor/parameters/enabled": "Y\n",
    "dev/kvm": "",
    "run/systemd/system/.there": "",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host that has all there is to have."""
    made = tmp_path / "host"
    for name, text in FILES.items():
        put(made, name, text)
    for module in MODULES:
        put(made, module.proof, "")
    for sysctl in SYSCTLS:
        put(made, sysctl.path, f"{sysctl.value}\n")
    for name in ("firecracker", "jailer"):
        put(made, f"usr/local/bin/{name}", "")
        (made / "usr/local/bin" / name).chmod(0o755)
    link = made / "etc/systemd/system/multi-user.target.wants/agentenv.service"
    link.parent.mkdir(parents=True)
    link.symlink_to("/etc/systemd/system/agentenv.service")
    (made / "var/lib/agentenv").mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(production.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 500 << 30})())
    return made


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def lacking(root: Path, facts: Facts = GOOD) -> dict[str, tuple[str, str]]:
    found = production_checks(load_config(node_home=Path("/var/lib/agentenv")), root, facts)
    assert len({check.name for check in found}) == len(found)
    for check in found:
        assert check.group == "production"
        assert check.status in ("ok", "warn"), "what production lacks keeps nothing from running"
        assert bool(check.hint) == (check.status != "ok"), check
        assert check.detail
    needs = [check.need for check in found]
    assert needs == sorted(needs, reverse=True), "the needed ones come first"
    return {check.name: (check.need, check.hint) for check in found if check.status != "ok"}


def test_a_host_that_has_all(root):
    assert lacking(root) == {}


@pytest.mark.parametrize(
    ("name", "text", "check", "need", "says"),
    [
        ("dev/kvm", None, "virtualisation", "needed", "modprobe kvm_intel"),
        ("sys/module/kvm_pvm/there", "", "virtualisation", "needed", "hardware virtualisation"),
        ("sys/fs/cgroup/cgroup.controllers", None, "cgroup v2", "needed", "unified_cgroup_hierarchy=1"),
        ("sys/fs/cgroup/cgroup.controllers", "cpu memory pids", "cgroup v2", "needed", "cgroup_disable"),
        ("proc/mounts", "tmpfs / tmpfs rw 0 0\n", "file system", "needed", "mount a disk"),
        ("proc/mounts", "/dev/vda / ext4 rw 0 0\nserver:/x /var/lib/agentenv nfs4 rw 0 0\n", "file system", "needed", "mount a disk"),
        ("proc/swaps", "Filename\n/swap file 1 0 -2\n", "swap", "advised", "vm.swappiness=10"),
        ("proc/sys/vm/nr_hugepages", "512\n", "huge pages", "advised", "nr_hugepages=0"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n", "transparent huge pages", "advised", "madvise"),
        ("sys/kernel/mm/ksm/run", "1\n", "same-page merging", "advised", "ksm/run"),
        ("sys/devices/system/cpu/smt/active", "1\n", "hyper-threads", "advised", "smt/control"),
        ("sys/devices/system/cpu/vulnerabilities/retbleed", "Vulnerable: no microcode\n", "processor flaws", "advised", "microcode"),
        ("sys/fs/selinux/enforce", "1", "access control", "advised", "ausearch"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n", "clock source", "advised", "tsc"),
    ],
)
def test_each_thing_that_is_missing(root, name, text, check, need, says):
    if text is None:
        (root / name).unlink()
    else:
        put(root, name, text)
    found = lacking(root)
    assert list(found) == [check]
    assert found[check][0] == need
    assert says in found[check][1]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_each_module(root, module):
    (root / module.proof).unlink()
    found = lacking(root)
    assert found[f"module {module.name}"] == (module.need, f"modprobe {module.name}")


@pytest.mark.parametrize("sysctl", SYSCTLS, ids=lambda sysctl: sysctl.name)
def test_each_setting(root, sysctl):
    put(root, sysctl.path, f"{sysctl.value - 1}\n")
    assert lacking(root) == {sysctl.name: (sysctl.need, f"sysctl -w {sysctl.name}={sysctl.value}")}
    put(root, sysctl.path, f"{sysctl.value + 1}\n")
    assert (sysctl.name in lacking(root)) == sysctl.exact


@pytest.mark.parametrize(
    ("facts", "check"),
    [
        (replace(GOOD, release="6.1.0-1-amd64"), "kernel"),
        (replace(GOOD, release="5.15.0"), "kernel"),
        (replace(GOOD, release="odd"), "kernel"),
        (replace(GOOD, clock_state=5), "time"),
        (replace(GOOD, clock_state=-1), "time"),
        (replace(GOOD, open_files=1024), "open files"),
    ],
)
def test_what_no_file_tells(root, facts, check):
    assert list(lacking(root, facts)) == [check]


def test_a_home_that_others_can_list(root):
    (root / "var/lib/agentenv").chmod(0o755)
    assert lacking(root) == {"home": ("needed", "chmod 0711 /var/lib/agentenv")}


def test_firecracker_must_be_where_the_service_looks(root):
    (root / "usr/local/bin/jailer").chmod(0o644)
    found = lacking(root)
    assert list(found) == ["firecracker"]
    assert "1.12 or newer" in found["firecracker"][1]
    (root / "opt").mkdir()
    (root / "usr/local/bin/jailer").chmod(0o755)
    (root / "usr/local/bin/jailer").rename(root / "opt/jailer")
    assert list(lacking(root)) == ["firecracker"]
    checks = production_checks(load_config(vmm_jailer="/opt/jailer"), root, GOOD)
    assert {check.status for check in checks if check.name == "firecracker"} == {"ok"}


def test_no_systemd_and_a_service_that_is_not_enabled(root):
    (root / "etc/systemd/system/multi-user.target.wants/agentenv.service").unlink()
    assert lacking(root) == {"service": ("advised", "aenv setup")}
    (root / "run/systemd/system/.there").unlink()
    (root / "run/systemd/system").rmdir()
    assert lacking(root) == {"service": ("advised", "run `aenv up` at boot")}


def test_an_empty_host_raises_nothing(tmp_path):
    found = lacking(tmp_path, Facts("", -1, 0))
    assert {"kernel", "virtualisation", "cgroup v2", "file system", "module tun"} <= set(found)
