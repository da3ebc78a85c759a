"""A small client of NFS version 3 (RFC 1813) that can also say what no honest client would."""

from __future__ import annotations

import itertools
import os
import socket
import struct
from dataclasses import dataclass, field

NFS, MOUNT = 100003, 100005
OK, PERMISSION, NO_ENTRY, ACCESS, EXISTS, CROSS_DEVICE, NOT_FOLDER, IS_FOLDER, INVALID = 0, 1, 2, 13, 17, 18, 20, 21, 22
NO_SPACE, NAME_TOO_LONG, NOT_EMPTY, STALE, BAD_HANDLE, NOT_SYNCHRONISED, BAD_TYPE = 28, 63, 66, 70, 10001, 10002, 10007
_KEEP = struct.pack(">6I", 0, 0, 0, 0, 0, 0)  # sattr3 that changes nothing


def u32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def u64(value: int) -> bytes:
    return struct.pack(">Q", value)


def opaque(data: bytes) -> bytes:
    return u32(len(data)) + data + bytes(-len(data) % 4)


def sattr(mode: int | None = None, uid: int | None = None, gid: int | None = None, size: int | None = None) -> bytes:
    parts = [u32(0) if value is None else u32(1, value) for value in (mode, uid, gid)]
    parts.append(u32(0) if size is None else u32(1) + u64(size))
    return b"".join(parts) + u32(0, 0)


class Reply:
    """Reads a reply from the front."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def u32(self) -> int:
        (value,), self.data = struct.unpack_from(">I", self.data), self.data[4:]
        return value

    def u64(self) -> int:
        (value,), self.data = struct.unpack_from(">Q", self.data), self.data[8:]
        return value

    def opaque(self) -> bytes:
        length = self.u32()
        taken, self.data = self.data[:length], self.data[length + (-length % 4) :]
        return taken

    def attributes(self) -> Attributes:
        kind, mode, nlink, uid, gid = (self.u32() for _ in range(5))
        size, _used, _rdev, _fsid, fileid = (self.u64() for _ in range(5))
        times = [self.u32() for _ in range(6)]
        return Attributes(kind, mode, nlink, uid, gid, size, fileid, times)

    def maybe_attributes(self) -> Attributes | None:
        return self.attributes() if self.u32() else None

    def change(self) -> Attributes | None:
        if self.u32():
            self.u64(), [self.u32() for _ in range(4)]
        return self.maybe_attributes()


@dataclass
class Attributes:
    kind: int
    mode: int
    links: int
    uid: int
    gid: int
    size: int
    fileid: int
    times: list[int] = field(repr=False)


class Refused(Exception):
    """The server refused the call itself: the `accept_stat`."""


class NfsClient:
    """Calls as user `uid`; handles are bytes."""

    def __init__(self, address: tuple[str, int], uid: int = 0, gid: int = 0, groups: tuple[int, ...] = ()) -> None:
        self.uid, self.gid, self.groups = uid, gid, groups
        self.socket = socket.create_connection(address, timeout=20)
        self._xids = itertools.count(int.from_bytes(os.urandom(3)) << 8)

    def close(self) -> None:
        self.socket.close()

    def send(self, program: int, procedure: int, arguments: bytes, version: int = 3, xid: int | None = None) -> int:
        xid = next(self._xids) if xid is None else xid
        credential = u32(0) + opaque(b"guest") + u32(self.uid, self.gid, len(self.groups), *self.groups)
        call = u32(xid, 0, 2, program, version, procedure, 1) + opaque(credential) + u32(0, 0) + arguments
        self.send_raw(call)
        return xid

    def send_raw(self, record: bytes) -> None:
        self.socket.sendall(u32(0x80000000 | len(record)) + record)

    def receive(self) -> tuple[int, int, bytes]:
        """xid, accept_stat and results of the next reply."""
        head = self._exactly(4)
        body = self._exactly(int.from_bytes(head) & 0x7FFFFFFF)
        xid, kind, accepted, _flavour, _length, status = struct.unpack_from(">6I", body)
        assert (kind, accepted) == (1, 0)
        return xid, status, body[24:]

    def call(self, program: int, procedure: int, arguments: bytes, version: int = 3, xid: int | None = None) -> Reply:
        sent = self.send(program, procedure, arguments, version, xid)
        received, status, results = self.receive()
        assert received == sent
        if status:
            raise Refused(status)
        return Reply(results)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise ConnectionError("the server closed the connection")
            data += part
        return data

    # -- procedures; each returns its status first

    def mount(self, path: str) -> bytes | None:
        reply = self.call(MOUNT, 1, opaque(path.encode()))
        return reply.opaque() if reply.u32() == OK else None

    def getattr(self, handle: bytes) -> tuple[int, Attributes | None]:
        reply = self.call(NFS, 1, opaque(handle))
        status = reply.u32()
        return status, None if status else reply.attributes()

    def setattr(self, handle: bytes, wanted: bytes = _KEEP, guard: bytes = u32(0)) -> int:
        return self.call(NFS, 2, opaque(handle) + wanted + guard).u32()

    def lookup(self, folder: bytes, name: bytes) -> tuple[int, bytes]:
        reply = self.call(NFS, 3, opaque(folder) + opaque(name))
        status = reply.u32()
        return status, b"" if status else reply.opaque()

    def access(self, handle: bytes, bits: int = 0x3F) -> tuple[int, int]:
        reply = self.call(NFS, 4, opaque(handle) + u32(bits))
        status = reply.u32()
        reply.maybe_attributes()
        return status, 0 if status else reply.u32()

    def readlink(self, handle: bytes) -> tuple[int, bytes]:
        reply = self.call(NFS, 5, opaque(handle))
        status = reply.u32()
        reply.maybe_attributes()
        return status, b"" if status else reply.opaque()

    def read(self, handle: bytes, offset: int = 0, count: int = 1 << 20) -> tuple[int, bytes, bool]:
        reply = self.call(NFS, 6, opaque(handle) + u64(offset) + u32(count))
        status = reply.u32()
        reply.maybe_attributes()
        if status:
            return status, b"", False
        reply.u32()
        at_end = bool(reply.u32())
        return status, reply.opaque(), at_end

    def write(self, handle: bytes, data: bytes, offset: int = 0, stable: int = 0) -> int:
        return self.call(NFS, 7, opaque(handle) + u64(offset) + u32(len(data), stable) + opaque(data)).u32()

    def create(self, folder: bytes, name: bytes, mode: int = 0o644, how: int = 0, mark: bytes = b"", xid: int | None = None):
        what = mark if how == 2 else sattr(mode)
        return self._made(8, opaque(folder) + opaque(name) + u32(how) + what, xid)

    def mkdir(self, folder: bytes, name: bytes, mode: int = 0o755) -> tuple[int, bytes]:
        return self._made(9, opaque(folder) + opaque(name) + sattr(mode))

    def symlink(self, folder: bytes, name: bytes, target: bytes) -> tuple[int, bytes]:
        return self._made(10, opaque(folder) + opaque(name) + _KEEP + opaque(target))

    def mknod(self, folder: bytes, name: bytes, kind: int) -> tuple[int, bytes]:
        device = u32(1, 3) if kind in (3, 4) else b""
        return self._made(11, opaque(folder) + opaque(name) + u32(kind) + sattr(0o666) + device)

    def _made(self, procedure: int, arguments: bytes, xid: int | None = None) -> tuple[int, bytes]:
        reply = self.call(NFS, procedure, arguments, xid=xid)
        status = reply.u32()
        if status:
            return status, b""
        assert reply.u32() == 1
        return status, reply.opaque()

    def remove(self, folder: bytes, name: bytes, xid: int | None = None) -> int:
        return self.call(NFS, 12, opaque(folder) + opaque(name), xid=xid).u32()

    def rmdir(self, folder: bytes, name: bytes) -> int:
        return self.call(NFS, 13, opaque(folder) + opaque(name)).u32()

    def rename(self, folder: bytes, name: bytes, other: bytes, new: bytes) -> int:
        return self.call(NFS, 14, opaque(folder) + opaque(name) + opaque(other) + opaque(new)).u32()

    def link(self, handle: bytes, folder: bytes, name: bytes) -> int:
        return self.call(NFS, 15, opaque(handle) + opaque(folder) + opaque(name)).u32()

    def readdir(self, folder: bytes, limit: int = 4096, plus: bool = False) -> tuple[int, dict[bytes, bytes]]:
        """Every name with its handle, as many calls as it takes."""
        found: dict[bytes, bytes] = {}
        cookie = 0
        while True:
            arguments = opaque(folder) + u64(cookie) + u64(0) + (u32(limit) if plus else b"") + u32(limit)
            reply = self.call(NFS, 17 if plus else 16, arguments)
            status = reply.u32()
            reply.maybe_attributes()
            if status:
                return status, found
            reply.u64()
            while reply.u32():
                reply.u64()
                name = reply.opaque()
                cookie = reply.u64()
                if plus:
                    reply.maybe_attributes()
                assert name not in found
                found[name] = reply.opaque() if plus and reply.u32() else b""
            if reply.u32():
                return status, found

    def fsinfo(self, handle: bytes) -> int:
        return self.call(NFS, 19, opaque(handle)).u32()

    def commit(self, handle: bytes) -> int:
        return self.call(NFS, 21, opaque(handle) + u64(0) + u32(0)).u32()
