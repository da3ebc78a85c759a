"""Carries a plan out, and takes back what was carried out.

Owns `/etc/agentenv/setup.json`: what was put in place, written before each step, so that a set-up that was broken off can be gone on
with or taken back. Invariant: only what the record names is taken away, and a file only while its content is ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.core.errors import AgentEnvError, HostNotReady
from agentenv.host.command import run_command
from agentenv.host.files import own_folder, write_atomic
from agentenv.host.production import SERVICE, SYSTEMD
from agentenv.host.setup_plan import ENABLED, HOME_MODE, RECORD, UNITS, Plan, package_facts
from agentenv.host.tuning import SYSCTLS

Report = Callable[[str], None]
Run = Callable[[Sequence[str]], object]
_COUNTED_ON = "required"
_COMMAND_DEADLINE_S = 900.0
"""Packages are fetched and unpacked; all else takes a moment."""


@dataclass(slots=True)
class Record:
    """What was put in place. `settings` are the values that kernel settings had before."""

    packages: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    enabled: bool = False


def run_here(argv: Sequence[str]) -> object:
    """Run a command on this machine. Internal or HostNotReady, with its words, when it fails."""
    return run_command(argv, timeout_s=_COMMAND_DEADLINE_S, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def apply_plan(plan: Plan, report: Report, run: Run = run_here) -> None:
    """Do what the plan says. May be repeated after a failure. HostNotReady: not root, or a step failed."""
    if os.geteuid() != 0:
        raise HostNotReady("setting a host up needs root", "run `aenv setup` as root")
    root, record = plan.root, read_record(plan.root)
    if plan.packages:
        record.packages = sorted({*record.packages, *plan.packages})
        _keep(root, record)
        report(f"install {' '.join(plan.packages)}")
        run([*_within(root), "apt-get", "update"])
        run([*_within(root), "apt-get", "install", "-y", "--no-install-recommends", *plan.packages])
    for file in plan.files:
        record.files[str(file.path)] = _digest(file.content.encode())
        _keep(root, record)
        report(f"write /{file.path}")
        write_atomic(root / file.path, file.content.encode())
    for folder in plan.folders:
        record.folders = sorted({*record.folders, str(folder)})
        _keep(root, record)
        own_folder(root / folder, HOME_MODE)
    for name in plan.modules:
        report(f"load {name}")
        run(["modprobe", name])
    _set(root, record, plan)
    if plan.enable:
        record.enabled = True
        _keep(root, record)
        report(f"{SERVICE} starts at boot")
        (root / ENABLED).parent.mkdir(parents=True, exist_ok=True)
        (root / ENABLED).unlink(missing_ok=True)
        (root / ENABLED).symlink_to(f"/{UNITS / SERVICE}")
    if plan.start:
        report(f"start {SERVICE}; the first start takes some minutes: `journalctl -fu {SERVICE}`")
        run(["systemctl", "daemon-reload"])
        run(["systemctl", "start", "--no-block", SERVICE])


def _set(root: Path, record: Record, plan: Plan) -> None:
    paths = {sysctl.name: root / sysctl.path for sysctl in SYSCTLS}
    for name, value in plan.sysctls:
        try:
            record.settings.setdefault(name, paths[name].read_text().strip())
            _keep(root, record)
            paths[name].write_text(f"{value}\n")
        except OSError as error:
            raise HostNotReady(
                f"{name} cannot be set to {value}: {error.strerror}", "inside a container this is the host's: set it there, then repeat"
            ) from error


def take_back(root: Path, report: Report, run: Run = run_here) -> None:
    """Take away what `apply_plan` put in place. Says what it leaves, and why. HostNotReady: not root."""
    if os.geteuid() != 0:
        raise HostNotReady("taking a set-up back needs root", "run `aenv setup --remove` as root")
    record = read_record(root)
    runs_systemd = root == Path("/") and (root / SYSTEMD).exists()
    if record.enabled:
        if runs_systemd:
            run(["systemctl", "stop", SERVICE])
        (root / ENABLED).unlink(missing_ok=True)
        report(f"{SERVICE} does not start at boot any more")
    for name, digest in record.files.items():
        _remove_file(root / name, digest, report)
    if runs_systemd:
        run(["systemctl", "daemon-reload"])
    for sysctl in SYSCTLS:
        if sysctl.name in record.settings:
            with contextlib.suppress(OSError):
                (root / sysctl.path).write_text(record.settings[sysctl.name] + "\n")
                report(f"set {sysctl.name} back to {record.settings[sysctl.name]}")
    for name in record.folders:
        try:
            (root / name).rmdir()
            report(f"removed /{name}")
        except FileNotFoundError:
            pass
        except OSError:
            report(f"left /{name}: it has the node's data")
    _remove_packages(root, record.packages, report, run)
    (root / RECORD).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (root / RECORD).parent.rmdir()


def _remove_packages(root: Path, names: Sequence[str], report: Report, run: Run) -> None:
    priorities = package_facts(root, names) if names else {}
    removed = [name for name, priority in priorities.items() if priority != _COUNTED_ON]
    if kept := sorted(set(priorities) - set(removed)):
        report(f"left {' '.join(kept)}: Debian counts on it")
    if removed:
        report(f"remove {' '.join(removed)}")
        try:  # not by apt, which would take along what was installed since and needs them
            run([*_within(root), "dpkg", "--remove", *removed])
        except AgentEnvError as error:
            report(f"not all of them could be removed: {error.message}")


def _within(root: Path) -> list[str]:
    return [] if root == Path("/") else ["chroot", str(root)]


def _remove_file(path: Path, digest: str, report: Report) -> None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    if _digest(content) != digest:
        report(f"left {path}: it was changed since")
        return
    path.unlink()
    report(f"removed {path}")


def read_record(root: Path) -> Record:
    """What was put in place below `root`; empty when nothing was. HostNotReady: the record is damaged."""
    path = root / RECORD
    try:
        return Record(**json.loads(path.read_text()))
    except FileNotFoundError:
        return Record()
    except (ValueError, TypeError) as error:
        raise HostNotReady(f"{path} cannot be read: {error}", "mend it, or remove it and what docs/production.md lists by hand") from error


def _keep(root: Path, record: Record) -> None:
    values = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    write_atomic(root / RECORD, json.dumps(values, indent=2).encode() + b"\n")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
