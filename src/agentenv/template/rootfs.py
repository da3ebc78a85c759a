"""Root file systems of the built-in templates: a small Debian in an ext4 image, made without a mount or a loop device.

    <cache>/assets/rootfs-<digest>/root.ext4   sparse raw image, file system label "root"

Made in two steps: mmdebstrap fills a folder from signed packages, `mke2fs -d` copies the folder into an image.
Invariants: what is in the image depends on the inputs and on the state of the mirror only, not on the host's release or
time; there is no secret and no identity in it (empty machine-id, no host keys, no resolver, no host name); no service
starts in it, since the guest's init is ours; the digest in the name covers the inputs, so another list of packages is
another image.

The image tells the kernel that its inode tables are zeroed (`assume_storage_prezeroed`: a new sparse file is). Otherwise
every guest would spend its first minutes writing zeros in the background, into its own layer of the disk.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.core.errors import InvalidInput
from agentenv.host.asset_cache import AssetCache, digest_of
from agentenv.host.command import Progress, no_progress, run_command
from agentenv.host.debian import ARCHITECTURE, DebianMirror, host_mirror, inherited_settings

FORMAT = 1
"""Raise when the way an image is made changes what is in it."""

DEFAULT_RELEASE = "bookworm"
BASE_PACKAGES = (
    "bash",
    "ca-certificates",
    "curl",
    "git",
    "iproute2",
    "ncurses-bin",
    "nodejs",
    "openssl",
    "procps",
    "python-is-python3",
    "python3",
    "python3-pip",
    "python3-venv",
    "sudo",
)
"""What clients of the API take for granted in a guest (contract section 5.1), beside Debian's own essential packages and apt."""

EXCLUDED_PATHS = (
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
)
"""Left out at unpacking, for these packages and for all that is installed later in the guest (licences stay)."""
INCLUDED_PATHS = ("/usr/share/doc/*/copyright", "/usr/share/locale/locale.alias")

USER_NAME, USER_ID = "user", 1000
GIB = 1 << 30
DEFAULT_SIZE_BYTES = 8 * GIB
MIN_SIZE_BYTES = GIB
MAX_SIZE_BYTES = 2048 * GIB
JOURNAL_MIB = 32
"""A small journal: enough for a guest's metadata traffic, and fewer blocks that change in a sandbox's layer."""

BOOTSTRAP_TIMEOUT_S = 1800.0
MAKE_IMAGE_TIMEOUT_S = 600.0

STAGED = "staged"
"""Where our own files lie, beside the tree, until they are copied in."""
PLACEHOLDERS = "placeholders"
"""The entries of placeholders for dpkg's status file, beside the tree."""

_NAMESPACE = uuid.UUID("5b0c9c1e-5d4f-4f0e-9a55-6d1f2f7f6b11")
"""Fixed, so that the file system's own ids follow from the digest."""
_FAKE_TIME = "1700000000"
"""The creation time written into the file system: a constant, so that it says nothing about when or where."""


@dataclass(frozen=True, slots=True)
class GuestFile:
    """A file of our own in a guest's root file system; it belongs to root."""

    path: str
    """Absolute. Its folders are made where they are missing, owned by root with mode 755."""
    content: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class RootFilesystem:
    """A finished image. The cache owns the file; it is a lower layer, never written."""

    path: Path
    digest: str
    size_bytes: int
    """Size as a disk; the file is sparse."""
    used_bytes: int
    """Bytes the file takes on the host's disk."""
    packages: tuple[str, ...]
    """`name=version` of every package in it, sorted."""


def ensure_rootfs(
    cache: Path,
    *,
    packages: Sequence[str] = (),
    placeholders: Sequence[str] = (),
    files: Sequence[GuestFile] = (),
    commands: Sequence[str] = (),
    release: str = DEFAULT_RELEASE,
    size_bytes: int = DEFAULT_SIZE_BYTES,
    mirror: DebianMirror | None = None,
    verify: bool = False,
    progress: Progress = no_progress,
) -> RootFilesystem:
    """The base image with `packages` added to the base list, from the cache or made now (minutes).

    `placeholders`, each `name=version`, count as installed though nothing of them is: dependencies that their dependents can do
    without. Installing the real package later replaces one, if `version` is lower than its own.

    `files` are put in after the packages, then `commands` run as root in the new file system, each by `sh -e`. Needs root,
    mmdebstrap and mke2fs. Raises InvalidInput (size, or name of a package or file), HostNotReady (a tool or a mirror is
    missing), Internal (mmdebstrap, a command or mke2fs failed; the end of what it said is in the message).
    """
    names = sorted({*BASE_PACKAGES, *packages})
    _check([*names, *(pair.partition("=")[0] for pair in placeholders)], files, release, size_bytes)
    inputs = {
        "format": FORMAT,
        "packages": names,
        "release": release,
        "size_bytes": size_bytes,
        "excluded": [*EXCLUDED_PATHS, *INCLUDED_PATHS],
        "files": [[file.path, file.mode, hashlib.sha256(file.content).hexdigest()] for file in files],
        "commands": list(commands),
    }
    if placeholders:
        inputs["placeholders"] = sorted(placeholders)
    digest = digest_of(inputs)

    def build(folder: Path) -> dict[str, Any]:
        used = mirror or host_mirror()
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tree-") as work:
            tree = Path(work) / "root"
            _stage(tree.parent / STAGED, files)
            (tree.parent / PLACEHOLDERS).write_text(placeholder_status(placeholders), encoding="utf-8")
            _bootstrap(tree, names, commands, release, used, progress)
            _finish_tree(tree, release, used)
            installed = installed_packages((tree / "var/lib/dpkg/status").read_text(encoding="utf-8"))
            progress("make file system", None, None)
            make_image(tree, folder / "root.ext4", size_bytes, digest)
            # The folder may be hundreds of MB; TemporaryDirectory removes it before the manifest is written.
        return {"inputs": inputs, "packages": installed}

    asset = AssetCache(cache).ensure(f"rootfs-{digest}", build, verify=verify)
    image = asset.path / "root.ext4"
    return RootFilesystem(image, digest, size_bytes, image.stat().st_blocks * 512, tuple(asset.facts["packages"]))


def make_image(tree: Path, image: Path, size_bytes: int, identity: str) -> None:
    """Copy the folder `tree` with owners, modes and attributes into a new ext4 image. Its ids follow from `identity`."""
    file_system_id, hash_seed = uuid.uuid5(_NAMESPACE, identity), uuid.uuid5(_NAMESPACE, f"{identity} hash seed")
    extended = f"hash_seed={hash_seed},assume_storage_prezeroed=1,root_owner=0:0"
    run_command(
        [
            "mke2fs",
            *("-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-L", "root", "-U", str(file_system_id)),
            *("-J", f"size={JOURNAL_MIB}", "-E", extended, "-d", tree, image, f"{size_bytes // 1024}k"),
        ],
        timeout_s=MAKE_IMAGE_TIMEOUT_S,
        env={"E2FSPROGS_FAKE_TIME": _FAKE_TIME, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
        hint="apt-get install e2fsprogs (1.47 or newer)",
    )


def installed_packages(status: str) -> list[str]:
    """`name=version` of every installed package in a dpkg status file, sorted."""
    found = []
    for stanza in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line and not line.startswith(" "))
        if fields.get("Status", "").endswith(" installed"):
            found.append(f"{fields['Package']}={fields['Version']}")
    return sorted(found)


def placeholder_status(placeholders: Sequence[str]) -> str:
    """Entries of a dpkg status file by which each `name=version` counts as installed."""
    return "".join(
        f"Package: {name}\nStatus: install ok installed\nPriority: optional\nSection: misc\nArchitecture: all\n"
        f"Maintainer: the template's recipe\nVersion: {version}\n"
        "Description: placeholder without files\n The template's programs work without it; install it by its name to have it.\n\n"
        for name, _, version in (pair.partition("=") for pair in placeholders)
    )


def guest_sources(release: str, mirror: DebianMirror) -> str:
    """apt's sources for use inside the guest: the same mirror, checked with the keyring that is part of Debian."""
    suites = [(mirror.uri, f"{release} {release}-updates")]
    if mirror.security_uri:
        suites.append((mirror.security_uri, f"{release}-security"))
    return "\n".join(
        f"Types: deb\nURIs: {uri}\nSuites: {names}\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        for uri, names in suites
    )


def _check(names: Sequence[str], files: Sequence[GuestFile], release: str, size_bytes: int) -> None:
    for name in names:
        if not re.match(r"^[a-z0-9][a-z0-9+.-]+$", name):
            raise InvalidInput(f"not a Debian package name: {name!r}")
    for file in files:
        if not file.path.startswith("/") or {"", ".", ".."} & set(file.path.split("/")[1:]):
            raise InvalidInput(f"not an absolute path of a file: {file.path!r}")
    if not re.match(r"^[a-z]+$", release):
        raise InvalidInput(f"not a Debian release name: {release!r}", "use a code name such as bookworm")
    if not MIN_SIZE_BYTES <= size_bytes <= MAX_SIZE_BYTES or size_bytes % 4096:
        raise InvalidInput(
            f"the root disk cannot be {size_bytes} bytes",
            f"use {MIN_SIZE_BYTES >> 30} to {MAX_SIZE_BYTES >> 30} GiB in whole 4096-byte blocks",
        )


def _stage(folder: Path, files: Sequence[GuestFile]) -> None:
    """Lay out our own files as they will be in the guest, so that one copy with owners and modes puts them in."""
    folder.mkdir()
    folder.chmod(0o755)  # its mode becomes that of the guest's root folder
    for file in files:
        path = folder / file.path.removeprefix("/")
        for missing in [parent for parent in reversed(path.parents) if not parent.exists()]:
            missing.mkdir()
            missing.chmod(0o755)
        path.write_bytes(file.content)
        path.chmod(file.mode)


def _bootstrap(tree: Path, names: Sequence[str], commands: Sequence[str], release: str, mirror: DebianMirror, progress: Progress) -> None:
    """Let mmdebstrap install the packages, add the user, put in the staged files and run the commands."""
    keyring = mirror.signed_by
    if "BEGIN PGP" in keyring:
        key_file = tree.parent / "archive-key.asc"
        key_file.write_text(keyring, encoding="utf-8")
        keyring = str(key_file)
    lines = [f"deb [signed-by={keyring}] {mirror.uri} {suite} main" for suite in (release, f"{release}-updates")]
    if mirror.security_uri:
        lines.append(f"deb [signed-by={keyring}] {mirror.security_uri} {release}-security main")
    network = inherited_settings(run_command(["apt-config", "dump"], timeout_s=60.0).decode(errors="replace"))
    dpkg_options = [f"path-exclude={path}" for path in EXCLUDED_PATHS] + [f"path-include={path}" for path in INCLUDED_PATHS]
    add_user = f'chroot "$1" useradd --uid {USER_ID} --user-group --create-home --shell /bin/bash {USER_NAME}'
    put_files = f'cp -a --no-preserve=timestamps {shlex.quote(str(tree.parent / STAGED))}/. "$1"/'
    hooks = [add_user, put_files, *(f'chroot "$1" /bin/sh -ec {shlex.quote(command)}' for command in commands)]
    installed = tree / "var/lib/dpkg/info"
    add_placeholders = f'cat {shlex.quote(str(tree.parent / PLACEHOLDERS))} >> "$1/var/lib/dpkg/status"'

    def watch() -> None:
        count = len(list(installed.glob("*.list"))) if installed.is_dir() else 0
        progress("install the base system (packages)", count, None)

    run_command(
        [
            "mmdebstrap",
            *("--mode=root", "--variant=minbase", "--format=directory", f"--architectures={ARCHITECTURE}"),
            f"--include={','.join(names)}",
            *(f"--aptopt={line}" for line in network.splitlines()),
            *(f"--dpkgopt={option}" for option in dpkg_options),
            f"--setup-hook={add_placeholders}",
            *(f"--customize-hook={hook}" for hook in hooks),
            release,
            tree,
            *lines,
        ],
        timeout_s=BOOTSTRAP_TIMEOUT_S,
        cwd=tree.parent,
        env={"SOURCE_DATE_EPOCH": _FAKE_TIME, "TMPDIR": str(tree.parent)},
        watch=watch,
        hint="apt-get install mmdebstrap; run as root, with a mirror that can be reached",
    )


def _finish_tree(tree: Path, release: str, mirror: DebianMirror) -> None:
    """Take out what came from the host or belongs to one machine only, and write the guest's own settings."""
    for name in ("etc/hostname", "etc/resolv.conf", "etc/apt/sources.list", "etc/apt/apt.conf.d/99mmdebstrap", "var/lib/dbus/machine-id"):
        (tree / name).unlink(missing_ok=True)
    for folder in ("var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/log", "tmp", "run"):
        for path in (tree / folder).iterdir() if (tree / folder).is_dir() else ():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    sudoers = (
        f"# The API's ordinary user may do all that root may: the machine itself is the boundary.\n{USER_NAME} ALL=(ALL) NOPASSWD:ALL\n"
    )
    files = {
        "etc/machine-id": ("", 0o444),
        "etc/resolv.conf": ("", 0o644),
        "etc/hosts": ("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n", 0o644),
        "etc/fstab": ("# The root disk is mounted by init.\n", 0o644),
        "etc/default/locale": ("LANG=C.UTF-8\n", 0o644),
        f"etc/sudoers.d/{USER_NAME}": (sudoers, 0o440),
        "etc/apt/sources.list.d/debian.sources": (guest_sources(release, mirror), 0o644),
    }
    for name, (text, mode) in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
