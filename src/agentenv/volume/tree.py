"""The content of one volume: what the content API does to a directory tree that hostile guests write too.

Invariants: nothing outside the tree is ever read, written or named, whatever links, device nodes or renames guests make
meanwhile; a file is replaced as a whole or not at all. All calls block: run them in a thread. Errors are those of
`core.errors`, with paths as the caller sees them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.errors import AgentEnvError, Conflict, Internal, InvalidInput, NotFound, PermissionDenied, StorageFull, Unsupported
from agentenv.host.confined import open_in, reopen

DEFAULT_UID = DEFAULT_GID = 1000
"""Who owns what the API makes when nobody is named: the default user of guests, so that programs there can use it."""
FILE_MODE, FOLDER_MODE = 0o644, 0o755
MODE_MAX = 0o7777
ID_MAX = 2**32 - 2  # the highest number means "leave it"
PATH_MAX_BYTES = 4095
LISTED_MAX = 50_000  # entries of one listing, about 15 MB of reply


@dataclass(frozen=True, slots=True)
class Entry:
    """What the tree has at one path; a link is itself, not what it leads to. `mode` holds permission bits only."""

    path: str
    kind: str  # file, directory, symlink or unknown
    size_bytes: int
    mode: int
    uid: int
    gid: int
    accessed_ms: int
    modified_ms: int
    changed_ms: int
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a caller wants set; None leaves it, or means the default for something new."""

    uid: int | None = None
    gid: int | None = None
    mode: int | None = None

    def check(self) -> None:
        """InvalidInput naming the field that no file can have."""
        for name, value, highest in (("uid", self.uid, ID_MAX), ("gid", self.gid, ID_MAX), ("mode", self.mode, MODE_MAX)):
            if value is not None and not 0 <= value <= highest:
                raise InvalidInput(f"{name}: must be 0 to {highest}, not {value}")


class Tree:
    """The tree below `root`, an existing folder that only the node writes the name of."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def stat(self, path: str) -> Entry:
        """What is at `path`. NotFound."""
        path = normal(path)
        with self._opened(path) as fd:
            return _entry(fd, path)

    def entries(self, path: str, depth: int) -> list[Entry]:
        """What is below the folder `path`, `depth` levels down, each folder followed by what it holds. NotFound, InvalidInput."""
        path = normal(path)
        found: list[Entry] = []
        with self._root_fd() as root, _told(path), _closing(open_in(root, path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            _walk(fd, path, depth, found)
        return found

    def make_folder(self, path: str, attributes: Attributes, parents: bool) -> Entry:
        """A new folder. Conflict when something is there, but with `parents` a folder may be; NotFound: no parent."""
        path = normal(path)
        if path == "/":
            if parents:
                return self.stat(path)
            raise Conflict("path '/' exists already")
        with self._parent(path, parents) as (parent, name), _told(path):
            try:
                _make_folder_in(parent, name, attributes)
            except FileExistsError:
                if not parents or not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise
            with _closing(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)) as fd:
                return _entry(fd, path)

    def update(self, path: str, attributes: Attributes) -> Entry:
        """Change owner and mode. A link's own owner can be changed, its mode cannot (InvalidInput). NotFound."""
        path = normal(path)
        with self._opened(path) as fd, _told(path):
            if attributes.mode is not None and stat.S_ISLNK(os.fstat(fd).st_mode):
                raise InvalidInput(f"path '{path}' is a symbolic link, whose mode cannot be changed", "name the file it leads to")
            _apply(fd, attributes)
            return _entry(fd, path)

    def remove(self, path: str) -> None:
        """Remove a file, a link or a folder with all it holds. NotFound; InvalidInput for the root."""
        path = normal(path)
        if path == "/":
            raise InvalidInput("the root of a volume cannot be removed", "delete the volume")
        with self._parent(path, create=False) as (parent, name), _told(path):
            if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=parent)
            else:
                os.unlink(name, dir_fd=parent)

    def open_file(self, path: str) -> tuple[int, int]:
        """A descriptor to read a regular file and its size in bytes; links inside the tree are followed. The caller closes it."""
        path = normal(path)
        with self._root_fd() as root, _told(path), _closing(open_in(root, path, os.O_PATH)) as fd:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                raise InvalidInput(f"path '{path}' is a directory", "list it instead")
            if not stat.S_ISREG(mode):
                raise InvalidInput(f"path '{path}' is no regular file")
            readable = reopen(fd, os.O_RDONLY)
            return readable, os.fstat(readable).st_size

    def upload(self, path: str, attributes: Attributes, overwrite: bool, parents: bool) -> Upload:
        """Begin to write a file. Conflict when it exists and must not be overwritten; InvalidInput when a folder is there."""
        path = normal(path)
        if path == "/":
            raise InvalidInput("the root of a volume is a directory")
        with self._parent(path, parents) as (parent, name), _told(path):
            _check_replaceable(parent, name, path, overwrite)
            fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=parent)
            return Upload(os.dup(parent), name, path, fd, attributes, overwrite)

    @contextlib.contextmanager
    def _root_fd(self) -> Iterator[int]:
        try:
            fd = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFound("the volume has been deleted") from error
        with _closing(fd):
            yield fd

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        """An O_PATH descriptor of `path` itself, be it a link."""
        with self._root_fd() as root, _told(path):
            fd = open_in(root, path, os.O_PATH | os.O_NOFOLLOW)
        with _closing(fd):
            yield fd

    @contextlib.contextmanager
    def _parent(self, path: str, create: bool) -> Iterator[tuple[int, str]]:
        """The opened folder that holds `path`, and the name in it."""
        folder, name = posixpath.split(path)
        with self._root_fd() as root:
            with _told(folder):
                try:
                    fd = open_in(root, folder, os.O_RDONLY | os.O_DIRECTORY)
                except FileNotFoundError:
                    if not create:
                        raise
                    fd = _make_folders(root, folder)
            with _closing(fd):
                yield fd, name


class Upload:
    """A file being written, invisible until `commit`. Call `close` in the end, whatever happened."""

    def __init__(self, parent: int, name: str, path: str, fd: int, attributes: Attributes, overwrite: bool) -> None:
        self._parent, self._fd = parent, fd
        self._name, self._path = name, path
        self._attributes, self._overwrite = attributes, overwrite

    def write(self, data: bytes) -> None:
        """Append. StorageFull."""
        view = memoryview(data)
        with _told(self._path):
            while view:
                view = view[os.write(self._fd, view) :]

    def commit(self) -> Entry:
        """Put the file in its place, with all that was written or not at all. A link there is replaced, not followed."""
        own = self._attributes
        with _told(self._path):
            _apply(self._fd, Attributes(_or(own.uid, DEFAULT_UID), _or(own.gid, DEFAULT_GID), _or(own.mode, FILE_MODE)))
            source = f"/proc/self/fd/{self._fd}"
            try:
                os.link(source, self._name, dst_dir_fd=self._parent)
            except FileExistsError:
                _check_replaceable(self._parent, self._name, self._path, self._overwrite)
                temporary = f".aenv-upload-{secrets.token_hex(8)}"
                os.link(source, temporary, dst_dir_fd=self._parent)
                try:
                    os.rename(temporary, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
                except OSError:
                    os.unlink(temporary, dir_fd=self._parent)
                    raise
            return _entry(self._fd, self._path)

    def close(self) -> None:
        """Let go; without a `commit` nothing is left of it."""
        os.close(self._fd)
        os.close(self._parent)


def normal(path: str) -> str:
    """`path` from the root of the volume, without `.` and `..`. InvalidInput when it can be no path."""
    if not path or "\0" in path:
        raise InvalidInput("path: must not be empty or hold a NUL character")
    tidy = posixpath.normpath("/" + path.lstrip("/"))
    if len(os.fsencode(tidy)) > PATH_MAX_BYTES:
        raise InvalidInput(f"path: longer than {PATH_MAX_BYTES} bytes")
    return tidy


def _walk(fd: int, path: str, depth: int, found: list[Entry]) -> None:
    for name in sorted(os.listdir(fd)):
        if len(found) >= LISTED_MAX:
            raise InvalidInput(f"'{path}' and what is below have more than {LISTED_MAX} entries", "list deeper folders one by one")
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            below = posixpath.join(path, name)
            with _closing(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)) as child:
                entry = _entry(child, below)
                found.append(entry)
                if depth > 1 and entry.kind == "directory":
                    with _closing(reopen(child, os.O_RDONLY | os.O_DIRECTORY)) as folder:
                        _walk(folder, below, depth - 1, found)


def _make_folders(root: int, folder: str) -> int:
    """Make every missing folder of `folder`; returns it opened. A link on the way is followed inside the root, once it exists."""
    at = ""
    for name in folder.strip("/").split("/"):
        upper = open_in(root, at or "/", os.O_RDONLY | os.O_DIRECTORY)
        with _closing(upper), contextlib.suppress(FileExistsError):
            _make_folder_in(upper, name, Attributes())
        at += "/" + name
    return open_in(root, folder, os.O_RDONLY | os.O_DIRECTORY)


def _make_folder_in(parent: int, name: str, own: Attributes) -> None:
    os.mkdir(name, 0o700, dir_fd=parent)
    with _closing(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)) as fd:
        _apply(fd, Attributes(_or(own.uid, DEFAULT_UID), _or(own.gid, DEFAULT_GID), _or(own.mode, FOLDER_MODE)))


def _check_replaceable(parent: int, name: str, path: str, overwrite: bool) -> None:
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise InvalidInput(f"path '{path}' is a directory", "name the file to write")
    if not overwrite:
        raise Conflict(f"path '{path}' exists already", "leave `force` out, or set it, to overwrite")


def _apply(fd: int, attributes: Attributes) -> None:
    """Owner first: a change of owner drops setuid bits. By name, since `fd` may be O_PATH; the name means what is opened, even a link."""
    name = f"/proc/self/fd/{fd}"
    if attributes.uid is not None or attributes.gid is not None:
        os.chown(name, _or(attributes.uid, -1), _or(attributes.gid, -1))
    if attributes.mode is not None:
        os.chmod(name, attributes.mode)  # noqa: PTH101


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _entry(fd: int, path: str) -> Entry:
    facts = os.fstat(fd)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    kind = kinds.get(stat.S_IFMT(facts.st_mode), "unknown")
    return Entry(
        path=path,
        kind=kind,
        size_bytes=facts.st_size,
        mode=stat.S_IMODE(facts.st_mode),
        uid=facts.st_uid,
        gid=facts.st_gid,
        accessed_ms=facts.st_atime_ns // 1_000_000,
        modified_ms=facts.st_mtime_ns // 1_000_000,
        changed_ms=facts.st_ctime_ns // 1_000_000,
        target=os.readlink("", dir_fd=fd) if kind == "symlink" else None,
    )


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    """Turn the system's errors into ours, about `path`."""
    try:
        yield
    except OSError as error:
        raise _translated(error, path) from error


def _translated(error: OSError, path: str) -> AgentEnvError:
    code = error.errno
    if code in (errno.ENOENT, errno.ENOTDIR):
        return NotFound(f"path '{path}' not found")
    if code == errno.EEXIST:
        return Conflict(f"path '{path}' exists already")
    if code in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull("no room left for the volume", "free some space on the node; the file there is unchanged")
    if code in (errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EISDIR):
        return InvalidInput(f"path '{path}': {os.strerror(code)}")
    if code in (errno.EXDEV, errno.EPERM, errno.EACCES):
        return PermissionDenied(f"path '{path}': {os.strerror(code)}")
    if code == errno.EOPNOTSUPP:
        return Unsupported("the node's file system cannot hold volumes", "put node.home on ext4, xfs or btrfs")
    return Internal(f"path '{path}': {error.strerror}")
