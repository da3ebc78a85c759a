"""Files that are whole or not there: atomic writes, private secrets, free space."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from agentenv.core.errors import Conflict, StorageFull
from agentenv.core.storage import DiskUse

_WARM_CHUNK_BYTES = 1 << 20
_COPY_CHUNK_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `data` in one step that survives a crash: either the old or the new content is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as out:
            os.fchmod(out.fileno(), mode)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def own_folder(folder: Path, mode: int = 0o700) -> None:
    """Make `folder` if need be, with `mode`, by default for its owner alone; one that is there gets it, too."""
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    folder.chmod(mode)


def take(made: Path, path: Path, limit_bytes: int) -> int:
    """Move a file that a confined program has made to the new file `path`, and return its size in bytes.

    The program may be hostile: nothing but a regular file of at most `limit_bytes` is taken, never what a link leads to.
    OSError otherwise; then there is no `path`.
    """
    source = os.open(made, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(source, "rb") as content:
        if not stat.S_ISREG(os.fstat(source).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(made))
        size_bytes = 0
        try:
            with path.open("xb") as target:
                path.chmod(0o444)  # a jail may read it as another user
                while chunk := content.read(_COPY_CHUNK_BYTES):
                    size_bytes += len(chunk)
                    if size_bytes > limit_bytes:
                        raise OSError(errno.EFBIG, f"more than {limit_bytes} bytes", str(made))
                    target.write(chunk)
        except FileExistsError:
            raise
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    made.unlink(missing_ok=True)
    return size_bytes


def require_free(folder: Path, needed_bytes: int, purpose: str) -> None:
    """StorageFull unless `folder` has `needed_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StorageFull(
            f"no room for {purpose}: {needed_bytes >> 20} MiB needed, {free >> 20} MiB free in {folder}",
            "free some space, or kill sandboxes that are no longer needed; nothing was lost",
        )


def disk_use(folder: Path) -> DiskUse:
    """How full the file system with `folder` is."""
    usage = shutil.disk_usage(folder)
    return DiskUse(usage.used, usage.free)


def write_out(folder: Path) -> None:
    """Have the kernel write all that was written to the file system with `folder` until now to its device. Blocks. OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _LIBC.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(fd)


@contextlib.contextmanager
def storage_full(what: str) -> Iterator[None]:
    """StorageFull, with what there was no room for, when the body meets a full disk. Whoever uses it leaves nothing half-written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no room for {what}", "free some space; nothing was lost") from error
        raise


def warm(path: Path, limit_bytes: int) -> int:
    """Read the data of a sparse file, at most `limit_bytes`, so that the kernel has it cached; returns how much that was. Blocks.

    Nothing of a device: it does not tell where it has none, and the cache would be filled with zeros.
    """
    if path.is_block_device():
        return 0
    done = 0
    with path.open("rb", buffering=0) as source:
        end, at = source.seek(0, os.SEEK_END), 0
        while at < end and done < limit_bytes:
            try:
                at = os.lseek(source.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    break
                raise
            stop = os.lseek(source.fileno(), at, os.SEEK_HOLE)
            while at < stop and done < limit_bytes:
                got = len(os.pread(source.fileno(), min(_WARM_CHUNK_BYTES, stop - at), at))
                if not got:
                    return done
                at, done = at + got, done + got
    return done


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock file for the body. Conflict at once when another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(f"another process is {what} ({path} is locked)", "wait for it to end, or choose another home") from error
        yield
