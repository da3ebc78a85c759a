"""What a host must have: one table, read by `aenv doctor`, by the setup target and by the documentation.

Invariants: a check only looks, changes nothing and ends within a few seconds; a failed check says what is wrong, and the
entry says how to mend it. Everything else (QEMU, the guest's kernel and root file system) is fetched into our own cache.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CHECK_TIMEOUT_S = 10.0
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where administrators' programs live: root's PATH may lack it (`su` without `-`)."""


@dataclass(frozen=True)
class Requirement:
    """One thing a host must, or should, have."""

    name: str
    why: str
    problem: Callable[[], str]
    """Looks at the host; returns what is wrong, or an empty text."""
    package: str
    """The Debian package that brings it; empty if none can."""
    hint: str
    """How to get it, for a person."""
    required: bool = True
    """False: something works without it; `why` says what is lost."""


@dataclass(frozen=True)
class Finding:
    """What a check found. `problem` is empty when all is well."""

    requirement: Requirement
    problem: str


def _program(name: str) -> Callable[[], str]:
    return lambda: "" if find_program(name) else f"no program {name}"


def _character_device(path: str) -> Callable[[], str]:
    def problem() -> str:
        try:
            facts = Path(path).stat()
        except OSError as error:
            return f"{path}: {error.strerror}"
        if not stat.S_ISCHR(facts.st_mode):
            return f"{path} is not a character device"
        return "" if os.access(path, os.R_OK | os.W_OK) else f"{path} cannot be opened by this user"

    return problem


def _not_linux() -> str:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"this is {platform.system()} on {platform.machine()}"
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return "" if found and (int(found[1]), int(found[2])) >= (5, 10) else f"the kernel is {platform.release()}"


def _not_root() -> str:
    return "" if os.geteuid() == 0 else f"running as user {os.geteuid()}"


def _mke2fs_problem() -> str:
    program = find_program("mke2fs")
    if program is None:
        return "no program mke2fs"
    try:
        said = subprocess.run([program, "-V"], capture_output=True, timeout=CHECK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"mke2fs -V: {error}"
    return mke2fs_version_problem((said.stderr + said.stdout).decode(errors="replace"))


def mke2fs_version_problem(text: str) -> str:
    """What is wrong with the mke2fs that says `text` for -V: it must be 1.47 or newer (pre-zeroed sparse images)."""
    found = re.search(r"mke2fs (\d+)\.(\d+)", text)
    if not found:
        return "mke2fs does not tell its version"
    return "" if (int(found[1]), int(found[2])) >= (1, 47) else f"mke2fs is {found[1]}.{found[2]}, 1.47 or newer is needed"


def _keyring_problem() -> str:
    path = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    return "" if path.is_file() else f"no {path}"


def find_program(name: str) -> str | None:
    """The path of a program, looked for in PATH and in the administrators' folders."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}")


def _apt(package: str) -> str:
    return f"apt-get install {package}"


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "linux",
        "microVMs and their network namespaces are Linux's, and guests are x86-64",
        _not_linux,
        "",
        "use x86-64 Linux 5.10 or newer",
    ),
    Requirement("root", "network namespaces, taps, mounts and jails need it", _not_root, "", "run the node server as root"),
    Requirement("/dev/net/tun", "a guest's network card is a tap device", _character_device("/dev/net/tun"), "", "modprobe tun"),
    Requirement("/dev/fuse", "serves guest memory, and disks where ublk is missing", _character_device("/dev/fuse"), "", "modprobe fuse"),
    Requirement("ip", "makes network namespaces and their links", _program("ip"), "iproute2", _apt("iproute2")),
    Requirement("nft", "address translation and egress rules of every sandbox", _program("nft"), "nftables", _apt("nftables")),
    Requirement("apt-get", "fetches kernel, QEMU and base system from the host's mirror", _program("apt-get"), "apt", "use a Debian host"),
    Requirement("dpkg-deb", "unpacks packages without installing them", _program("dpkg-deb"), "dpkg", "use a Debian host"),
    Requirement(
        "archive keyring",
        "packages are checked against Debian's keys",
        _keyring_problem,
        "debian-archive-keyring",
        _apt("debian-archive-keyring"),
    ),
    Requirement("mmdebstrap", "makes the base root file system", _program("mmdebstrap"), "mmdebstrap", _apt("mmdebstrap")),
    Requirement("mke2fs", "turns a folder into a disk image, without a mount", _mke2fs_problem, "e2fsprogs", _apt("e2fsprogs")),
    Requirement("skopeo", "fetches images from registries", _program("skopeo"), "skopeo", _apt("skopeo"), required=False),
    Requirement("zstd", "takes Debian's kernel image apart", _program("zstd"), "zstd", _apt("zstd")),
    Requirement("lz4", "only for kernels of your own that are packed with lz4", _program("lz4"), "lz4", _apt("lz4"), required=False),
    Requirement(
        "qemu",
        "not needed: a fit QEMU is fetched into the cache when the host has none",
        _program("qemu-system-x86_64"),
        "",
        "nothing to do; one from the host is used if it is version 10 or newer",
        required=False,
    ),
)


def check_host() -> list[Finding]:
    """Every entry of the table with what is wrong with it on this host, in the order of the table."""
    return [Finding(requirement, requirement.problem()) for requirement in REQUIREMENTS]


def packages_to_install(findings: list[Finding]) -> list[str]:
    """The Debian packages that would mend the failed required entries, sorted."""
    return sorted({finding.requirement.package for finding in findings if finding.problem and finding.requirement.required} - {""})
