"""What makes a Debian or Ubuntu host a production node, step by step; nothing is done here but looking.

    packages -> modules and kernel settings, at boot and now -> the node's home -> the service, at boot and now

A step knows whether it is done already, so that a plan for a host that is ready is empty.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from pathlib import Path

from agentenv.core.errors import HostNotReady
from agentenv.host.production import SERVICE, SYSTEMD
from agentenv.host.requirements import REQUIREMENTS
from agentenv.host.tuning import MODULES, OPEN_FILES_MAX, SYSCTLS

RECORD = Path("etc/agentenv/setup.json")
MODULES_FILE = Path("etc/modules-load.d/agentenv.conf")
SYSCTL_FILE = Path("etc/sysctl.d/60-agentenv.conf")
UNITS = Path("etc/systemd/system")
SLICE = "agentenv.slice"
ENABLED = UNITS / "multi-user.target.wants" / SERVICE
HOME_MODE = 0o711
_QUERY_DEADLINE_S = 30
_NOTE = "# Put here by `aenv setup`; `aenv setup --remove` takes it away."


@dataclass(frozen=True, slots=True)
class File:
    """A file below the root folder, with all of its content."""

    path: Path
    content: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done to one root file system, in this order. Paths are below `root`."""

    root: Path
    packages: tuple[str, ...] = ()
    files: tuple[File, ...] = ()
    folders: tuple[Path, ...] = ()
    enable: bool = False
    modules: tuple[str, ...] = ()
    sysctls: tuple[tuple[str, int], ...] = ()
    start: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def is_empty(self) -> bool:
        """Whether the host is as it should be."""
        return not (self.packages or self.files or self.folders or self.enable or self.modules or self.sysctls or self.start)

    def lines(self) -> list[str]:
        """The whole plan for a person, contents of files included."""
        out = [f"install packages: {' '.join(self.packages)}"] if self.packages else []
        for file in self.files:
            out += [f"write /{file.path}: {file.why}", *(f"    {line}" for line in file.content.splitlines())]
        out += [f"make the folder /{folder}, mode {HOME_MODE:04o}" for folder in self.folders]
        out += [f"load the kernel module {name}" for name in self.modules]
        out += [f"set {name} = {value}" for name, value in self.sysctls]
        out += [f"have {SERVICE} start at boot"] if self.enable else []
        out += [f"start {SERVICE}"] if self.start else []
        return out + [f"note: {note}" for note in self.notes]


def make_plan(root: Path, home: Path, program: Path, with_packages: bool = True, start: bool = True) -> Plan:
    """The plan for the host whose files are below `root`. HostNotReady when it is not Debian's kind, or `program` is not there.

    `home` is the node's home and `program` the `aenv` that the service runs, both as seen from inside `root`. What concerns the kernel
    and the processes of a machine is planned only for this machine's own root.
    """
    _require_debian(root)
    if not (root / program.relative_to("/")).is_file():
        raise HostNotReady(
            f"there is no {program} for the service to run", "install the wheel there, or name it: `aenv setup --program PATH`"
        )
    is_here = root == Path("/")
    runs_systemd = is_here and (root / SYSTEMD).exists()
    files = [file for file in wanted_files(program) if _content(root / file.path) != file.content]
    changed_unit = any(file.path.parent == UNITS for file in files)
    enable = not (root / ENABLED).is_symlink()
    notes = [] if runs_systemd or not is_here else ["systemd does not run here: nothing is started, only what it needs is put in place"]
    return Plan(
        root,
        _missing_packages(root) if with_packages else (),
        tuple(files),
        tuple(path for path in (home.relative_to("/"),) if not (root / path).is_dir()),
        enable,
        tuple(module.name for module in MODULES if is_here and not (root / module.proof).exists()),
        tuple(_settings_now(root)) if is_here else (),
        start and runs_systemd and (enable or changed_unit),
        tuple(notes),
    )


def wanted_files(program: Path) -> list[File]:
    """Every file that a production node has outside its own folders."""
    modules = "\n".join(module.name for module in MODULES)
    settings = "\n".join(f"# {sysctl.why}\n{sysctl.name} = {sysctl.value}" for sysctl in SYSCTLS)
    unit = unit_text(SERVICE).replace("@AENV@", str(program)).replace("@OPEN_FILES@", str(OPEN_FILES_MAX))
    return [
        File(MODULES_FILE, f"{_NOTE}\n{modules}\n", "kernel modules that are loaded at boot"),
        File(SYSCTL_FILE, f"{_NOTE}\n{settings}\n", "kernel settings"),
        File(UNITS / SLICE, unit_text(SLICE), "the slice of the node's server and blockd"),
        File(UNITS / SERVICE, unit, "the node as a service"),
    ]


def unit_text(name: str) -> str:
    """A unit as it is packaged."""
    return (package_files("agentenv") / "systemd" / name).read_text()


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _settings_now(root: Path) -> list[tuple[str, int]]:
    """Settings whose value now does not fit. Those that come with a module which is not loaded yet are among them."""
    found = []
    for sysctl in SYSCTLS:
        text = _content(root / sysctl.path).strip()
        if not (text.isdigit() and sysctl.fits(int(text))):
            found.append((sysctl.name, sysctl.value))
    return found


def _require_debian(root: Path) -> None:
    release = _content(root / "etc/os-release")
    kinds = set(re.findall(r"^ID(?:_LIKE)?=\"?([^\"\n]*)", release, re.MULTILINE))
    words = {word for kind in kinds for word in kind.split()}
    if not words & {"debian", "ubuntu"}:
        raise HostNotReady(
            f"{root / 'etc/os-release'} tells of no Debian or Ubuntu",
            "install by hand what `aenv doctor` misses, or see docs/production.md",
        )


def _missing_packages(root: Path) -> tuple[str, ...]:
    wanted = sorted({entry.package for entry in REQUIREMENTS} - {""})
    installed = package_facts(root, wanted)
    return tuple(name for name in wanted if name not in installed)


def package_facts(root: Path, names: Sequence[str]) -> dict[str, str]:
    """The priority of each of the packages that is installed below `root`. HostNotReady: there is no dpkg to ask."""
    form = "${Package} ${db:Status-Status} ${Priority}\\n"
    query = ["dpkg-query", f"--admindir={root / 'var/lib/dpkg'}", "-W", "-f", form, *names]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_DEADLINE_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostNotReady(f"dpkg-query cannot be asked for packages: {error}", "use a Debian or Ubuntu host") from error
    lines = (line.split() for line in said.splitlines())
    return {words[0]: words[2] if len(words) > 2 else "" for words in lines if len(words) > 1 and words[1] == "installed"}
