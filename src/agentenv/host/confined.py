"""Opening files below a folder whose content somebody hostile writes.

The kernel itself keeps the walk inside (openat2 with RESOLVE_IN_ROOT, Linux 5.6): `..` and absolute links mean the folder,
also while another process renames things. Names of /proc and other file systems mounted below are not entered.
"""

from __future__ import annotations

import ctypes
import errno
import os

_SYS_OPENAT2 = 437  # the same on every architecture
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_TRIES = 16  # EAGAIN: something was renamed during a walk over `..`; each try is a new walk
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_in(root_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """A descriptor of `path` as if `root_fd` were `/`, closed on exec and owned by the caller. OSError as from open(2)."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_XDEV)
    for _ in range(_TRIES):
        fd = _libc.syscall(_SYS_OPENAT2, root_fd, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return int(fd)
        code = ctypes.get_errno()
        if code != errno.EAGAIN:
            break
    raise OSError(code, os.strerror(code), path)


def reopen(path_fd: int, flags: int) -> int:
    """Open for I/O what an O_PATH descriptor names, which must not be a link; owned by the caller."""
    return os.open(f"/proc/self/fd/{path_fd}", flags | os.O_CLOEXEC)
