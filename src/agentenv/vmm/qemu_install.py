"""A QEMU that is fit to run guests: the host's, or one taken from a Debian package and run from the cache.

    <cache>/assets/qemu-<package version>/bin/qemu-system-x86_64
                                         /lib/      the loader and every library it needs, in one flat folder
                                         /share/    the firmware of the machine types we use

Invariants: the host is not changed; the packaged program uses its own loader and libraries only (never a library of
the host, so the host's age does not matter); a version known to be bad for guests is never returned.

Why one flat folder: the loader tries every library in every folder of its path, with four CPU-level subfolders each.
Most of the start-up time that is left (17 ms, measured) is page faults while the loader relocates 13 MB of read-only
tables of a position-independent program; doing without would mean a fixed address, so no address randomisation for a
program that faces hostile guests. Start processes ahead of time instead.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentenv.core.errors import AgentEnvError, HostNotReady, Internal
from agentenv.host.asset_cache import Asset, Facts
from agentenv.host.command import Progress, no_progress, run_command
from agentenv.host.debian import PrivateApt, unpack
from agentenv.host.package_asset import Recipe, package_asset

PROGRAM = "qemu-system-x86_64"
DEFAULT_PACKAGE = "qemu-system-x86"
DEFAULT_SUITE = "bookworm-backports"
RUN_TIMEOUT_S = 30.0

HINT = "leave vmm.qemu empty to have a fit QEMU fetched, or set it to a QEMU 10 or newer of your own"

MIN_VERSION = (10, 0, 0)
KNOWN_BAD: tuple[tuple[tuple[int, int, int], tuple[int, int, int], str], ...] = (
    (
        (0, 0, 0),
        (7, 2, 999),
        "its emulation miscompiles cmpxchg16b (guest kernels die at random) and crashes multiprocessor guests that patch their own code",
    ),
    ((7, 3, 0), (9, 999, 999), "restore of device state alone was only proved from 10.0 on"),
)
"""First and last version of each bad range, and what is wrong. Kept as a table so that a later bad release is one more line."""

FIRMWARE = (
    "bios-microvm.bin",
    "bios-256k.bin",
    "kvmvapic.bin",
    "linuxboot.bin",
    "linuxboot_dma.bin",
    "multiboot.bin",
    "multiboot_dma.bin",
    "pvh.bin",
    "qboot.rom",
    "efi-virtio.rom",
)
"""What machine types microvm and q35 with virtio devices load. The rest of the packages' firmware is left out."""
FIRMWARE_FOLDERS = ("usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu")
LIBRARY_FOLDERS = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu")
LOADER = "ld-linux-x86-64.so.2"
MAX_LINKS = 8
"""Links followed from one file of a package; its chains are one or two long."""
LOADED_LATER = ("libgcc_s.so.1",)
"""glibc opens it by name when a thread is cancelled, so it is in no list of needed libraries."""


@dataclass(frozen=True)
class QemuInstallation:
    """How to start QEMU: `argv` is the beginning of its command line. Files of a packaged one belong to the cache."""

    argv: tuple[str, ...]
    version: str
    """As in "10.0.2"; part of a snapshot's identity."""
    build: str
    """The distribution's name for this build, empty if it gives none."""
    source: Literal["host", "package"]


def ensure_qemu(
    cache: Path,
    *,
    program: str = "",
    prefer: Literal["auto", "host", "package"] = "auto",
    package: str = DEFAULT_PACKAGE,
    suite: str = DEFAULT_SUITE,
    apt: PrivateApt | None = None,
    refresh: bool = False,
    verify: bool = False,
    progress: Progress = no_progress,
) -> QemuInstallation:
    """A fit QEMU: with "auto" the host's if it is fit, else the packaged one (fetched if it is not cached: 36 MB).

    `program` names one to use and no other. `refresh` looks for a newer package, `verify` compares full checksums of the
    cached files. Raises HostNotReady (the one asked for is missing or unfit; no mirror), Unavailable (network) or Internal
    (the package does not run).
    """
    if program:
        return host_qemu(program)
    if prefer != "package":
        try:
            return host_qemu()
        except AgentEnvError:
            if prefer == "host":
                raise

    def recipe(apt: PrivateApt) -> Recipe:
        version = apt.show(package, suite)["Version"]

        def make(folder: Path) -> Facts:
            debs = apt.download([f"{package}={version}"], suite, progress=progress)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as work:
                unpack(debs, Path(work), progress)
                progress("keep what QEMU needs", None, None)
                _take_what_is_needed(Path(work), folder)
            apt.discard(debs)
            upstream, build = _fit_version(packaged_argv(folder), "the packaged QEMU")
            return {"package": f"{package}={version}", "version": upstream, "build": build}

        return version, make

    return _packaged(package_asset(cache, "qemu", package, suite, recipe, apt=apt, refresh=refresh, verify=verify, progress=progress))


def host_qemu(program: str = PROGRAM) -> QemuInstallation:
    """The host's own QEMU. Raises HostNotReady when there is none or its version or machine types do not do."""
    path = shutil.which(program)
    if path is None:
        raise HostNotReady(f"the host has no {program}", HINT)
    version, build = _fit_version((path,), f"the host's {path}")
    return QemuInstallation((path,), version, build, "host")


def parse_version(text: str) -> tuple[str, str]:
    """Version and build name out of `qemu --version`. Raises Internal for other text."""
    match = re.match(r"QEMU emulator version (\d+\.\d+\.\d+)(?:[^ \n]*)?(?: \(([^)\n]*)\))?", text)
    if not match:
        raise Internal(f"not the version text of QEMU: {text[:80]!r}")
    return match.group(1), match.group(2) or ""


def why_unfit(version: str) -> str:
    """Why a version must not run guests; empty if it may."""
    numbers = tuple(int(part) for part in version.split("."))
    for first, last, reason in KNOWN_BAD:
        if first <= numbers <= last:
            return reason
    return "" if numbers >= MIN_VERSION else f"older than {'.'.join(map(str, MIN_VERSION))}"


def packaged_argv(root: Path) -> tuple[str, ...]:
    """The command line that runs a packaged QEMU with its own loader, libraries and firmware, and nothing of the host's."""
    return (
        str(root / "lib" / LOADER),
        "--library-path",
        str(root / "lib"),
        "--inhibit-cache",
        "--argv0",
        PROGRAM,
        str(root / "bin" / PROGRAM),
        "-L",
        str(root / "share"),
    )


def _packaged(asset: Asset) -> QemuInstallation:
    return QemuInstallation(packaged_argv(asset.path), asset.facts["version"], asset.facts["build"], "package")


def _fit_version(argv: tuple[str, ...], whose: str) -> tuple[str, str]:
    version, build = parse_version(run_command([*argv, "--version"], timeout_s=RUN_TIMEOUT_S).decode(errors="replace"))
    if reason := why_unfit(version):
        raise HostNotReady(f"{whose} is version {version}, which cannot run guests: {reason}", HINT)
    machines = run_command([*argv, "-machine", "help"], timeout_s=RUN_TIMEOUT_S).decode(errors="replace")
    if not re.search(r"^microvm\s", machines, re.MULTILINE):
        raise HostNotReady(f"{whose} has no machine type microvm", HINT)
    return version, build


def _take_what_is_needed(root: Path, into: Path) -> None:
    for part in ("bin", "lib", "share"):
        (into / part).mkdir()
    shutil.copy2(root / "usr/bin" / PROGRAM, into / "bin" / PROGRAM)
    for path in needed_libraries(root):
        shutil.copy2(_inside(root, path), into / "lib" / path.name)
    for name in FIRMWARE:
        found = next((path for folder in FIRMWARE_FOLDERS if (path := _inside(root, root / folder / name)).exists()), None)
        if found is None:
            raise Internal(f"the QEMU packages hold no firmware {name}", HINT)
        shutil.copy2(found, into / "share" / name)


def needed_libraries(root: Path) -> list[Path]:
    """The loader and the libraries below an unpacked `root` that the program loads, by the name it asks for."""
    loader = _find_library(root, LOADER)
    folders = [str(root / folder) for folder in LIBRARY_FOLDERS]
    listed = run_command(
        [loader, "--library-path", ":".join(folders), "--inhibit-cache", "--list", root / "usr/bin" / PROGRAM], timeout_s=RUN_TIMEOUT_S
    ).decode()
    if missing := re.findall(r"^\s*(\S+) => not found", listed, re.MULTILINE):
        raise Internal(f"the QEMU packages lack {', '.join(missing)}", HINT)
    names = [Path(path).name for path in re.findall(r"=> (/\S+) \(", listed)]
    return [_find_library(root, name) for name in dict.fromkeys([*names, LOADER, *LOADED_LATER])]


def _find_library(root: Path, name: str) -> Path:
    for folder in LIBRARY_FOLDERS:
        path = root / folder / name
        if _inside(root, path).exists():
            return path
    raise Internal(f"the QEMU packages hold no {name}", HINT)


def _inside(root: Path, path: Path) -> Path:
    """The file `path` stands for. An absolute link of a package means a place below `root`, never one of the host."""
    for _ in range(MAX_LINKS):
        if not path.is_symlink():
            break
        target = path.readlink()
        path = root / target.relative_to("/") if target.is_absolute() else path.parent / target
    return path
