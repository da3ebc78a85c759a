"""Mounts made in the mount namespace of another process, for as long as it needs them.

The way there is one-way for a thread, so each call has a thread of its own that ends with it and does nothing else. Paths there
are resolved below the process's own root: whatever it has put in the way, nothing outside is reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

from agentenv.core.errors import Internal, NotFound

_libc = ctypes.CDLL(None, use_errno=True)
_OPEN_TREE, _MOVE_MOUNT = 428, 429  # system calls, the same on every architecture
_AT_FDCWD = -100
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_FROM_DESCRIPTOR = 0x4  # MOVE_MOUNT_F_EMPTY_PATH
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8


def lend(pid: int, source: Path, target: str) -> None:
    """Let process `pid` have our file `source` at `target`, where it has a file, until `take_back`. NotFound: it is gone. Blocks."""
    tree = _checked(_libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC), f"open {source}")
    at = os.fsencode(target)
    try:
        _inside(pid, lambda: _libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, at, _FROM_DESCRIPTOR), f"mount {source} at {target}")
    finally:
        os.close(tree)


def take_back(pid: int, target: str) -> None:
    """End what `lend` has lent. No error when the process is gone, and its mounts with it. Internal: nothing was lent. Blocks."""
    at = os.fsencode(target)
    with contextlib.suppress(NotFound):
        _inside(pid, lambda: _libc.umount2(at, _MNT_DETACH | _UMOUNT_NOFOLLOW), f"unmount {target}")


def _inside(pid: int, call: Callable[[], int], what: str) -> None:
    """Make one system call in the mount namespace of `pid`."""
    try:
        namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"process {pid} has ended") from error
    outcome: list[int] = []

    def there() -> None:
        for step in (lambda: _libc.unshare(_CLONE_FS), lambda: _libc.setns(namespace, _CLONE_NEWNS), call):
            if step() < 0:
                outcome.append(ctypes.get_errno())
                return

    thread = threading.Thread(target=there, name=f"mounts of {pid}")
    try:
        thread.start()
        thread.join()
    finally:
        os.close(namespace)
    if outcome:
        raise Internal(f"cannot {what} for process {pid}: {os.strerror(outcome[0])}", "mounts in other namespaces need root and Linux 5.2")


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise Internal(f"cannot {what}: {os.strerror(ctypes.get_errno())}")
    return result
