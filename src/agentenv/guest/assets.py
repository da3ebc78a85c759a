"""What a guest boots from, joined: a kernel and the initramfs made for it.

Owns nothing but the order of steps. Invariant: kernel, modules and initramfs always belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentenv.guest.initramfs import Initramfs, ensure_initramfs
from agentenv.guest.kernel import DEFAULT_PACKAGE, DEFAULT_SUITE, Kernel, ensure_kernel, local_kernel
from agentenv.host.command import Progress, no_progress


@dataclass(frozen=True)
class GuestAssets:
    """A kernel and its initramfs. The cache owns the files."""

    kernel: Kernel
    initramfs: Initramfs


def ensure_guest_assets(
    cache: Path,
    init: Path,
    *,
    local_vmlinux: Path | None = None,
    package: str = DEFAULT_PACKAGE,
    suite: str = DEFAULT_SUITE,
    refresh: bool = False,
    verify: bool = False,
    progress: Progress = no_progress,
) -> GuestAssets:
    """Kernel and initramfs with `init` (the static `envd`) as its first program; from the cache, or fetched and made.

    `local_vmlinux` is a kernel of the operator's own with all it needs built in; the package is then not looked at.
    A first call fetches 34 MB; later ones take some 10 ms. Blocks: call it in a thread. Errors as of `ensure_kernel`
    and `ensure_initramfs`.
    """
    if local_vmlinux is not None:
        kernel = local_kernel(local_vmlinux)
    else:
        kernel = ensure_kernel(cache, package=package, suite=suite, refresh=refresh, verify=verify, progress=progress)
    return GuestAssets(kernel, ensure_initramfs(cache, kernel, init, verify=verify, progress=progress))
