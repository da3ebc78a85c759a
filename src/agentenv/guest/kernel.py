"""The guest's kernel: found in a Debian package, taken apart, cached.

    <cache>/assets/kernel-<version>/vmlinux      uncompressed ELF image, what a microVM monitor loads directly
    <cache>/assets/kernel-<version>/modules.tar  lib/modules/<release>/** of the same package, files as packaged
    <cache>/assets/kernel-<version>/config       the build configuration

Invariants: nothing is installed and no package script runs; the modules always belong to the vmlinux beside them;
once cached, a kernel is used without any look at the network, so snapshots made with it stay restorable.

The bzImage layout (Linux Documentation/arch/x86/boot.rst): sector count of the setup code at 0x1f1 (0 means 4), "HdrS"
at 0x202, protocol version at 0x206, and from version 2.08 on payload_offset at 0x248 and payload_length at 0x24c,
counted from the end of the setup code. The payload is one compressed ELF file; every format but gzip is followed by
the uncompressed size as 4 bytes.
"""

from __future__ import annotations

import bz2
import hashlib
import lzma
import re
import struct
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.errors import HostNotReady, Internal, InvalidInput, NotFound, Unsupported
from agentenv.host.asset_cache import Asset, Facts
from agentenv.host.command import Progress, no_progress, run_command
from agentenv.host.debian import PrivateApt, unpack
from agentenv.host.package_asset import Recipe, package_asset

DEFAULT_PACKAGE = "linux-image-cloud-amd64"
DEFAULT_SUITE = "bookworm-backports"

GUEST_SETTINGS = "init_on_free=1"
"""What every guest's kernel is told, whichever VMM runs it: it zeroes memory when it is freed instead of when it is handed out, so
that freed memory takes no room in a snapshot, and what a program has freed is in none."""

MAX_VMLINUX_BYTES = 512 << 20
"""Largest image accepted: ten times Debian's, and a bound on what a damaged header can make us write."""
DECOMPRESS_TIMEOUT_S = 120.0

_MODULE_DIR = re.compile(r"^(?:usr/)?lib/modules/([^/]+)$")


@dataclass(frozen=True)
class Kernel:
    """A kernel to boot. The files belong to the cache (or to whoever named a local vmlinux); they are only read."""

    version: str
    """What `uname -r` says in the guest; part of a snapshot's identity together with the package version."""
    vmlinux: Path
    modules_tar: Path | None
    """None for a local kernel with everything built in."""
    package: str
    """`name=version` of the Debian package, or empty for a local file."""
    sha256: str
    """Of vmlinux."""


def ensure_kernel(
    cache: Path,
    *,
    package: str = DEFAULT_PACKAGE,
    suite: str = DEFAULT_SUITE,
    apt: PrivateApt | None = None,
    refresh: bool = False,
    verify: bool = False,
    progress: Progress = no_progress,
) -> Kernel:
    """The newest cached kernel of `package` from `suite`, fetched if there is none (or a newer one with `refresh`).

    `verify` compares full checksums of the cached files first. Raises HostNotReady (no mirror, a tool is missing),
    Unavailable (network) or NotFound (no such package).
    """

    def recipe(apt: PrivateApt) -> Recipe:
        name, version = _image_package(apt, package, suite)

        def make(folder: Path) -> Facts:
            debs = apt.download([f"{name}={version}"], suite, closure=False, progress=progress)
            progress("unpack kernel", None, None)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as work:
                unpack(debs, Path(work))
                kernel_release = _take_apart(Path(work), folder)
            apt.discard(debs)
            return {"package": f"{name}={version}", "release": kernel_release}

        return version, make

    return _kernel(package_asset(cache, "kernel", package, suite, recipe, apt=apt, refresh=refresh, verify=verify, progress=progress))


def local_kernel(vmlinux: Path, modules_tar: Path | None = None) -> Kernel:
    """A kernel of the operator's own: an uncompressed ELF image. Raises InvalidInput if it is something else."""
    try:
        image = vmlinux.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read the kernel {vmlinux}: {error.strerror}", "give the path of an uncompressed vmlinux") from error
    if not image.startswith(b"\x7fELF"):
        raise InvalidInput(f"{vmlinux} is not an uncompressed ELF kernel", "give a vmlinux; a bzImage (vmlinuz) must be extracted first")
    return Kernel(kernel_release_of(image), vmlinux.resolve(), modules_tar, "", hashlib.sha256(image).hexdigest())


def extract_vmlinux(bzimage: bytes) -> bytes:
    """The ELF kernel inside a bzImage. Raises InvalidInput for what is no bzImage, Unsupported for an unknown compression."""
    if bzimage[0x202:0x206] != b"HdrS" or len(bzimage) < 0x250:
        raise InvalidInput("not a bzImage: no HdrS signature", "a Linux x86 vmlinuz is expected")
    (protocol,) = struct.unpack_from("<H", bzimage, 0x206)
    if protocol < 0x0208:
        raise Unsupported(
            f"boot protocol {protocol >> 8}.{protocol & 0xFF:02d} does not say where its payload is", "use a kernel newer than 2.6.26"
        )
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = ((bzimage[0x1F1] or 4) + 1) * 512 + offset
    payload = bzimage[start : start + length]
    if len(payload) != length or length < 16:
        raise InvalidInput(f"bzImage is cut short: its payload should be {length} bytes at {start}, the file has {len(bzimage)} bytes")
    image = _decompress(payload)
    if not image.startswith(b"\x7fELF"):
        raise InvalidInput("the payload of the bzImage is not an ELF file")
    return image


def kernel_release_of(vmlinux: bytes) -> str:
    """The release (`uname -r`) written in a kernel image. Raises InvalidInput if there is none."""
    match = re.search(rb"Linux version (\d[\x21-\x7e]{1,63}) ", vmlinux)
    if not match:
        raise InvalidInput("the image has no Linux version text", "give an x86-64 Linux vmlinux")
    return match.group(1).decode()


def _decompress(payload: bytes) -> bytes:
    try:
        if payload.startswith(b"\x7fELF"):
            return payload
        if payload.startswith(b"\x1f\x8b"):
            return _gunzip(payload)
        body, size_bytes = payload[:-4], struct.unpack("<I", payload[-4:])[0]
        if size_bytes > MAX_VMLINUX_BYTES:
            raise InvalidInput(f"the kernel would be {size_bytes} bytes uncompressed, more than {MAX_VMLINUX_BYTES}")
        if body.startswith(b"\xfd7zXZ\x00") or body.startswith(b"\x5d\x00\x00"):
            image = lzma.LZMADecompressor().decompress(body, size_bytes + 1)
        elif body.startswith(b"BZh"):
            image = bz2.BZ2Decompressor().decompress(body, size_bytes + 1)
        elif body.startswith(b"\x28\xb5\x2f\xfd"):
            image = _decompress_with_tool("zstd", body)
        elif body.startswith(b"\x02\x21\x4c\x18"):
            image = _decompress_with_tool("lz4", body)
        else:
            raise Unsupported(
                f"unknown kernel compression (starts with {payload[:6].hex()})", "use a kernel compressed with gzip, xz, lz4 or zstd"
            )
    except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
        raise InvalidInput(f"the payload of the bzImage is damaged: {error}") from error
    if len(image) != size_bytes:
        raise InvalidInput(f"the kernel should be {size_bytes} bytes uncompressed and is {len(image)}")
    return image


def _gunzip(payload: bytes) -> bytes:
    stream = zlib.decompressobj(wbits=31)
    image = stream.decompress(payload, MAX_VMLINUX_BYTES + 1)
    if len(image) <= MAX_VMLINUX_BYTES and not stream.eof:
        raise InvalidInput("the payload of the bzImage is cut short")
    if len(image) > MAX_VMLINUX_BYTES:
        raise InvalidInput(f"the kernel is more than {MAX_VMLINUX_BYTES} bytes uncompressed")
    return image


def _decompress_with_tool(tool: str, body: bytes) -> bytes:
    with tempfile.TemporaryFile() as stdin:
        stdin.write(body)
        stdin.seek(0)
        try:
            hint = f"apt-get install {tool}"
            return run_command(
                [tool, "-d", "-c"], stdin=stdin, timeout_s=DECOMPRESS_TIMEOUT_S, max_output_bytes=MAX_VMLINUX_BYTES, hint=hint
            )
        except HostNotReady:
            raise
        except Internal as error:
            raise InvalidInput(f"the payload of the bzImage is damaged: {error.message}") from error


def _image_package(apt: PrivateApt, package: str, suite: str) -> tuple[str, str]:
    """Name and version of the package with the image itself: a metapackage depends on exactly one."""
    fields = apt.show(package, suite)
    match = re.search(r"(?:^|,)\s*(linux-image-\S+)(?:\s*\(=\s*([^)]+)\))?", fields.get("Depends", ""))
    if not match:
        return package, fields["Version"]
    return match.group(1), match.group(2) or apt.show(match.group(1), suite)["Version"]


def _take_apart(root: Path, into: Path) -> str:
    """Write vmlinux, config and modules.tar of an unpacked image package; returns the kernel's release."""
    images = sorted((root / "boot").glob("vmlinuz-*"))
    if len(images) != 1:
        raise NotFound(f"the kernel package holds {len(images)} images below /boot, one is expected", "name a linux-image package")
    release = images[0].name.removeprefix("vmlinuz-")
    vmlinux = extract_vmlinux(images[0].read_bytes())
    if kernel_release_of(vmlinux) != release:
        raise InvalidInput(f"{images[0].name} holds kernel {kernel_release_of(vmlinux)}")
    (into / "vmlinux").write_bytes(vmlinux)
    (into / "config").write_bytes((root / "boot" / f"config-{release}").read_bytes())
    modules = next((path for path in (root / "lib/modules" / release, root / "usr/lib/modules" / release) if path.is_dir()), None)
    if modules is None:
        raise NotFound(f"the kernel package has no modules for {release}")
    with tarfile.open(into / "modules.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(modules, f"lib/modules/{release}", filter=_plain_entry)
    return release


def _plain_entry(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mtime = 0
    return entry if entry.isfile() or entry.isdir() else None


def _kernel(asset: Asset) -> Kernel:
    return Kernel(
        asset.facts["release"], asset.path / "vmlinux", asset.path / "modules.tar", asset.facts["package"], asset.checksums["vmlinux"]
    )
