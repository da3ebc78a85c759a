"""The initramfs every guest starts from: `envd` as /init and the kernel modules it needs before there is a root disk.

    /init                 envd, mode 0755
    /modules/<name>.ko    uncompressed modules
    /modules/load         their file names, one a line, each after those it depends on
    /dev /proc /sys /run /newroot   empty folders; /dev/console (5,1) so that init has a standard error from the start

Invariants: same inputs give the same bytes (it is cached by their digest); modules built into the kernel are simply
not there; a missing module that the guest cannot do without is an error here, not a hang at boot.
Which modules depend on which is read from the modules themselves (`depends=` in their .modinfo section): the package
carries no modules.dep, and computing one would need depmod on the host.
"""

from __future__ import annotations

import gzip
import lzma
import re
import struct
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.errors import InvalidInput, NotFound
from agentenv.guest.cpio import CpioWriter
from agentenv.guest.kernel import Kernel
from agentenv.host.asset_cache import AssetCache, digest_of, sha256_file
from agentenv.host.command import Progress, no_progress, run_command

FORMAT = 1
"""Raise when the layout of the archive changes, so that caches make it anew."""

REQUIRED_MODULES = ("virtio_mmio", "virtio_blk", "virtio_net", "ext4")
"""Without these a guest finds no devices, no disk, no network or cannot mount its root."""
OPTIONAL_MODULES = ("virtio_pci", "crc32c_generic", "virtio_rng", "virtio_balloon", "overlay", "fuse", "tun", "nfsv3")
"""Wanted by what runs in guests, small, and loaded before the root disk's own module tree (images have none) could help.
nfsv3 mounts volumes. crc32c_generic is what ext4 checksums need where it is no built-in (Linux 6.1)."""

MAX_INIT_BYTES = 64 << 20
"""Largest /init accepted: envd is a few MB; the archive stays in guest memory until it is unpacked."""
DECOMPRESS_TIMEOUT_S = 30.0

ARCHIVE = "initramfs.cpio"
FOLDERS = ("dev", "proc", "sys", "run", "newroot", "modules")


@dataclass(frozen=True)
class Initramfs:
    """A finished initramfs. The cache owns the file."""

    path: Path
    digest: str
    modules: tuple[str, ...]
    """File names in the order of /modules/load."""
    sha256: str
    """Of the file."""


@dataclass(frozen=True)
class Module:
    """One kernel module: its canonical name, uncompressed bytes and the names of those it depends on."""

    name: str
    image: bytes
    depends: tuple[str, ...]


def ensure_initramfs(cache: Path, kernel: Kernel, init: Path, *, verify: bool = False, progress: Progress = no_progress) -> Initramfs:
    """The initramfs for `kernel` with the static program `init`, from the cache or made now (well under a second).

    Raises InvalidInput (`init` is no static x86-64 ELF program) or NotFound (the kernel lacks a required module).
    """
    init_sha256 = _check_init(init)
    inputs = {
        "format": FORMAT,
        "kernel": [kernel.version, kernel.package],
        "modules_tar": sha256_file(kernel.modules_tar) if kernel.modules_tar and not kernel.package else "",
        "init": init_sha256,
        "modules": [*REQUIRED_MODULES, *OPTIONAL_MODULES],
    }
    digest = digest_of(inputs)

    def build(folder: Path) -> dict[str, object]:
        progress("make initramfs", None, None)
        modules = select_modules(kernel) if kernel.modules_tar else []
        (folder / ARCHIVE).write_bytes(pack(init.read_bytes(), modules))
        return {"inputs": inputs, "modules": [f"{module.name}.ko" for module in modules]}

    asset = AssetCache(cache).ensure(f"initramfs-{digest}", build, verify=verify)
    return Initramfs(asset.path / ARCHIVE, digest, tuple(asset.facts["modules"]), asset.checksums[ARCHIVE])


def pack(init: bytes, modules: Iterable[Module]) -> bytes:
    """The archive: uncompressed, because unpacking a compressed one costs an emulated guest more than reading a plain one."""
    writer = CpioWriter()
    for name in FOLDERS:
        writer.folder(name)
    writer.character_device("dev/console", 5, 1)
    writer.file("init", init, 0o755)
    listed = list(modules)
    for module in listed:
        writer.file(f"modules/{module.name}.ko", module.image)
    writer.file("modules/load", "".join(f"{module.name}.ko\n" for module in listed).encode())
    return writer.finish()


def select_modules(kernel: Kernel, required: Sequence[str] = REQUIRED_MODULES, optional: Sequence[str] = OPTIONAL_MODULES) -> list[Module]:
    """The wanted modules of `kernel` with all they depend on, in loading order. Raises NotFound for a required one."""
    if kernel.modules_tar is None:
        return []
    with tarfile.open(kernel.modules_tar) as tar:
        paths: dict[str, str] = {}
        builtin: set[str] = set()
        for entry in tar:
            if match := re.search(r"/([^/]+)\.ko(?:\.(?:xz|zst|gz))?$", entry.name):
                paths[canonical_name(match.group(1))] = entry.name
            elif entry.name.endswith("/modules.builtin"):
                listed = _read(tar, entry.name).decode()
                builtin = {canonical_name(Path(line).name.removesuffix(".ko")) for line in listed.split()}
        loaded: dict[str, Module] = {}

        def load(name: str) -> Module:
            if name not in loaded:
                image = decompress_module(paths[name], _read(tar, paths[name]))
                loaded[name] = Module(name, image, module_depends(image))
            return loaded[name]

        wanted = []
        for name in (*required, *optional):
            if name in paths:
                wanted.append(name)
            elif name in required and name not in builtin:
                raise NotFound(
                    f"kernel {kernel.version} has no module {name}",
                    f"name a kernel with {', '.join(required)} (guest.kernel_suite, guest.kernel)",
                )
        order = load_order(wanted, lambda name: load(name).depends if name in paths else None, builtin)
    return [loaded[name] for name in order]


def load_order(
    wanted: Iterable[str], depends: Callable[[str], tuple[str, ...] | None], builtin: set[str] | frozenset[str] = frozenset()
) -> list[str]:
    """`wanted` and all they depend on, each after its own dependencies, otherwise in the order given.

    `depends(name)` gives the names a module needs, or None for one that does not exist; built-in ones are passed over.
    Raises NotFound for a missing dependency and InvalidInput for a circle.
    """
    order: dict[str, None] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in order or name in builtin:
            return
        if name in path:
            raise InvalidInput(f"kernel modules depend on each other in a circle: {' -> '.join((*path, name))}")
        needed = depends(name)
        if needed is None:
            raise NotFound(f"kernel module {name} is missing (needed by {' -> '.join(path) or 'the guest'})")
        for other in needed:
            visit(other, (*path, name))
        order[name] = None

    for name in wanted:
        visit(name, ())
    return list(order)


def canonical_name(name: str) -> str:
    """Module names treat - and _ alike; the kernel writes _."""
    return name.replace("-", "_")


def module_depends(image: bytes) -> tuple[str, ...]:
    """What a module says it depends on. Raises InvalidInput for something that is no ELF module."""
    for word in elf_section(image, ".modinfo").split(b"\0"):
        if word.startswith(b"depends="):
            return tuple(canonical_name(name) for name in word[8:].decode().split(",") if name)
    return ()


def elf_section(image: bytes, wanted: str) -> bytes:
    """The content of a section of a 64-bit little-endian ELF file. Raises InvalidInput if it has none of that name."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise InvalidInput("not a 64-bit ELF file")
    try:
        (table,) = struct.unpack_from("<Q", image, 0x28)
        entry_bytes, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
        sections = [struct.unpack_from("<IIQQQQ", image, table + number * entry_bytes) for number in range(count)]
        names_offset = sections[names_index][4]
        for name_at, _kind, _flags, _address, offset, size_bytes in sections:
            start = names_offset + name_at
            if image[start : image.index(b"\0", start)] == wanted.encode():
                return image[offset : offset + size_bytes]
    except (struct.error, IndexError, ValueError) as error:
        raise InvalidInput(f"damaged ELF file: {error}") from error
    raise InvalidInput(f"the ELF file has no section {wanted}")


def decompress_module(name: str, packed: bytes) -> bytes:
    """The plain module of a `.ko`, `.ko.xz`, `.ko.zst` or `.ko.gz` file."""
    if name.endswith(".xz"):
        return lzma.decompress(packed)
    if name.endswith(".gz"):
        return gzip.decompress(packed)
    if name.endswith(".zst"):
        with tempfile.TemporaryFile() as stdin:
            stdin.write(packed)
            stdin.seek(0)
            return run_command(["zstd", "-d", "-c"], stdin=stdin, timeout_s=DECOMPRESS_TIMEOUT_S, hint="apt-get install zstd")
    return packed


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    content = tar.extractfile(name)
    return content.read() if content else b""


def _check_init(init: Path) -> str:
    """Its sha256, after a look that it can run as the first program of an empty system."""
    hint = "build it with `make build`, or name another static x86-64 program"
    try:
        size_bytes = init.stat().st_size
        with open(init, "rb") as content:
            head = content.read(64)
    except OSError as error:
        raise InvalidInput(f"cannot read the guest's init {init}: {error.strerror}", hint) from error
    if size_bytes > MAX_INIT_BYTES:
        raise InvalidInput(f"{init} is {size_bytes} bytes, more than the {MAX_INIT_BYTES} an initramfs takes", hint)
    if head[:6] != b"\x7fELF\x02\x01" or head[18:20] != b"\x3e\x00":
        raise InvalidInput(f"{init} is not an x86-64 ELF program", hint)
    if _needs_interpreter(init.read_bytes()):
        raise InvalidInput(f"{init} is linked dynamically; an initramfs has no loader for it", hint)
    return sha256_file(init)


def _needs_interpreter(image: bytes) -> bool:
    """Whether an ELF program names a dynamic loader (a PT_INTERP header, type 3)."""
    (table,) = struct.unpack_from("<Q", image, 0x20)
    entry_bytes, count = struct.unpack_from("<HH", image, 0x36)
    return any(struct.unpack_from("<I", image, table + number * entry_bytes)[0] == 3 for number in range(count))
