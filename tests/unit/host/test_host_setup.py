"""`aenv setup` on root file systems made for it: the plan, what is put in place, what is taken back, and the units themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentenv.cli.main import cli
from agentenv.core.errors import HostNotReady, Internal
from agentenv.host import setup_plan
from agentenv.host.requirements import REQUIREMENTS
from agentenv.host.setup_apply import apply_plan, read_record, take_back
from agentenv.host.setup_plan import ENABLED, MODULES_FILE, RECORD, SYSCTL_FILE, UNITS, make_plan
from agentenv.host.tuning import MODULES, SYSCTLS

HOME, PROGRAM = Path("/var/lib/agentenv"), Path("/opt/agentenv/bin/aenv")
WORST_EXPOSURE = 7.5
"""What `systemd-analyze security` may say at most (10 is none of its options); docs/production.md tells why it is not lower."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What dpkg, the plan and the steps look at of a Debian."""
    made = tmp_path / "root"
    for folder in ("etc/systemd/system", "var/lib/dpkg/info", "var/lib/dpkg/updates", "opt/agentenv/bin"):
        (made / folder).mkdir(parents=True)
    (made / "etc/os-release").write_text('NAME="Debian"\nID=debian\n')
    (made / "var/lib/dpkg/status").write_text("")
    (made / "opt/agentenv/bin/aenv").write_text("#!/bin/sh\n")
    return made


def install(root: Path, *packages: str) -> None:
    """As dpkg would say it."""
    rest = "Version: 1\nArchitecture: amd64\nMaintainer: x\nDescription: x\n\n"
    priorities = {name: "required" if name == "e2fsprogs" else "optional" for name in packages}
    entries = (f"Package: {name}\nStatus: install ok installed\nPriority: {priority}\n{rest}" for name, priority in priorities.items())
    (root / "var/lib/dpkg/status").write_text("".join(entries))


def files_of(root: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(root))] = f"-> {path.readlink()}"
        elif path.is_file():
            found[str(path.relative_to(root))] = path.read_bytes()
    return found


def test_a_bare_host_gets_everything_and_a_second_time_nothing(root):
    ran: list[tuple[str, ...]] = []

    def run(argv):
        ran.append(tuple(argv))
        install(root, *[entry.package for entry in REQUIREMENTS if entry.package])

    plan = make_plan(root, HOME, PROGRAM)
    assert {entry.package for entry in REQUIREMENTS} - {""} == set(plan.packages)
    text = "\n".join(plan.lines())
    for word in (*plan.packages, "net.ipv4.ip_forward = 1", "ublk_drv", "KillMode=process", "/var/lib/agentenv", "start at boot"):
        assert word in text
    before = files_of(root)
    apply_plan(plan, lambda _: None, run)
    assert [argv[:4] for argv in ran] == [("chroot", str(root), "apt-get", "update"), ("chroot", str(root), "apt-get", "install")]
    assert (root / "var/lib/agentenv").stat().st_mode & 0o777 == 0o711
    assert (root / MODULES_FILE).read_text().splitlines()[1:] == [module.name for module in MODULES]
    settings = dict(line.split(" = ") for line in (root / SYSCTL_FILE).read_text().splitlines() if "=" in line and line[0] != "#")
    assert settings == {sysctl.name: str(sysctl.value) for sysctl in SYSCTLS}
    unit = (root / UNITS / "agentenv.service").read_text()
    assert f"ExecStart={PROGRAM} up\n" in unit
    assert not re.findall(r"@[A-Z_]+@", unit)
    assert (root / ENABLED).readlink() == Path("/etc/systemd/system/agentenv.service")

    again = make_plan(root, HOME, PROGRAM)
    assert again.is_empty, again.lines()
    record = read_record(root)
    apply_plan(again, lambda _: None, run)
    assert (len(ran), read_record(root)) == (2, record)

    take_back(root, lambda _: None, lambda argv: ran.append(tuple(argv)))
    removed = [name for name in plan.packages if name != "e2fsprogs"]  # it came with us, but no Debian goes without it
    assert ran[-1] == ("chroot", str(root), "dpkg", "--remove", *removed)
    shutil.rmtree(root / "var/lib/dpkg")
    assert files_of(root) == {name: content for name, content in before.items() if "dpkg" not in name}
    assert not (root / "var/lib/agentenv").exists()


def test_what_was_there_before_or_was_changed_since_is_left(root):
    have = [entry.package for entry in REQUIREMENTS if entry.package and entry.package != "skopeo"]
    install(root, *have)  # skopeo will seem to be missing at first, and be there when it is taken back
    (root / "var/lib/agentenv").mkdir(parents=True)
    plan = make_plan(root, HOME, PROGRAM)
    assert plan.packages == ("skopeo",)
    assert plan.folders == ()
    apply_plan(plan, lambda _: None, lambda argv: install(root, *have, "skopeo"))
    (root / "var/lib/agentenv/node.db").write_text("data")
    (root / SYSCTL_FILE).write_text("net.ipv4.ip_forward = 0\n")
    said: list[str] = []
    ran: list[tuple[str, ...]] = []
    take_back(root, said.append, lambda argv: ran.append(tuple(argv)))
    assert [argv[-1] for argv in ran] == ["skopeo"]
    assert (root / SYSCTL_FILE).read_text() == "net.ipv4.ip_forward = 0\n"
    assert any("sysctl.d" in line and "changed since" in line for line in said)
    assert (root / "var/lib/agentenv/node.db").read_text() == "data"
    assert not (root / UNITS / "agentenv.service").exists()


def test_packages_that_others_need_by_now_are_left(root):
    apply_plan(make_plan(root, HOME, PROGRAM), lambda _: None, lambda argv: install(root, "skopeo", "zstd"))

    def refuse(argv):
        raise Internal("dpkg failed with status 1: other depends on zstd")

    said: list[str] = []
    take_back(root, said.append, refuse)
    assert "not all of them could be removed: dpkg failed with status 1: other depends on zstd" in said
    assert not (root / RECORD).exists()


def test_a_home_with_data_is_left(root):
    apply_plan(make_plan(root, HOME, PROGRAM, with_packages=False), lambda _: None)
    (root / "var/lib/agentenv/node.db").write_text("data")
    said: list[str] = []
    take_back(root, said.append)
    assert "left /var/lib/agentenv: it has the node's data" in said


def test_a_set_up_that_broke_off_is_gone_on_with_and_taken_back(root):
    def fail(argv):
        raise HostNotReady("no mirror answers")

    with pytest.raises(HostNotReady, match="mirror"):
        apply_plan(make_plan(root, HOME, PROGRAM), lambda _: None, fail)
    assert "skopeo" in read_record(root).packages
    rest = make_plan(root, HOME, PROGRAM)
    assert rest.packages
    assert rest.files
    apply_plan(rest, lambda _: None, lambda argv: None)
    take_back(root, lambda _: None, lambda argv: None)
    assert not (root / RECORD).exists()
    assert not (root / ENABLED).is_symlink()


def test_a_new_version_of_a_file_replaces_the_old(root, monkeypatch):
    apply_plan(make_plan(root, HOME, PROGRAM, with_packages=False), lambda _: None)
    moved = make_plan(root, HOME, Path("/opt/agentenv/bin/../bin/aenv"), with_packages=False)
    assert [file.path.name for file in moved.files] == ["agentenv.service"]
    monkeypatch.setattr(setup_plan, "SYSCTLS", SYSCTLS[:3])
    assert [file.path for file in make_plan(root, HOME, PROGRAM, with_packages=False).files] == [SYSCTL_FILE]


@pytest.mark.parametrize(
    ("release", "fits"),
    [("ID=debian", True), ("ID=ubuntu\nID_LIKE=debian", True), ('ID=mint\nID_LIKE="ubuntu debian"', True), ("ID=fedora", False)],
)
def test_only_debian_and_its_kin(root, release, fits):
    (root / "etc/os-release").write_text(release + "\n")
    if fits:
        assert make_plan(root, HOME, PROGRAM).files
        return
    with pytest.raises(HostNotReady, match="Debian") as caught:
        make_plan(root, HOME, PROGRAM)
    assert "aenv doctor" in caught.value.hint


def test_the_command_shows_the_plan_and_asks(root):
    def aenv(*arguments, **more):
        words = ["setup", "--root", str(root), "--program", str(PROGRAM), "--no-packages", *arguments]
        return CliRunner().invoke(cli, words, prog_name="aenv", **more)

    before = files_of(root)
    shown = aenv("--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "write /etc/systemd/system/agentenv.service" in shown.stdout
    assert "    KillMode=process" in shown.stdout
    refused = aenv()
    assert refused.exit_code == 1
    assert "--yes" in refused.stderr
    assert files_of(root) == before
    assert aenv("--yes").exit_code == 0
    assert "nothing is to be done" in aenv("--yes").stderr
    assert aenv("--remove", "--yes").exit_code == 0
    assert files_of(root) == before
    missing = CliRunner().invoke(cli, ["setup", "--root", str(root), "--program", "/nowhere/aenv", "--dry-run"], prog_name="aenv")
    assert missing.exit_code == 1
    assert "--program" in missing.stderr


def test_the_units_are_what_systemd_takes(root, tmp_path):
    """`systemd-analyze` of Debian's systemd, which the tests' set-up brings."""
    assert shutil.which("systemd-analyze"), "these tests need systemd: `tools/setup.sh tests`"
    apply_plan(make_plan(root, HOME, PROGRAM, with_packages=False), lambda _: None)
    for name in ("agentenv.service", "agentenv.slice"):  # the program stands in for itself
        text = (root / UNITS / name).read_text().replace(str(PROGRAM), "/bin/true")
        (tmp_path / name).write_text(text)
    units = [str(tmp_path / name) for name in ("agentenv.service", "agentenv.slice")]
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, timeout=120, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={int(WORST_EXPOSURE * 10)}", units[0]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert judged.returncode == 0, judged.stdout[-300:]


@pytest.mark.parametrize(
    "option",
    [
        "ProtectSystem",
        "ProtectHome",
        "PrivateTmp",
        "PrivateDevices",
        "PrivateMounts",
        "ReadWritePaths",
        "ProtectProc",
        "ProtectControlGroups",
    ],
)
def test_the_service_shares_the_mounts_of_the_machine(option):
    """With any of these a restarted server would not see the namespaces and disks of the VMs that run."""
    lines = [line for line in setup_plan.unit_text("agentenv.service").splitlines() if not line.startswith("#")]
    assert not [line for line in lines if line.startswith(f"{option}=")]
