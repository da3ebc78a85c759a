"""An empty FUSE folder for tests of what is refused on network file systems: `tiny_fuse.py PID FOLDER`.

Mounts in the mount space of that process, prints `mounted` once it serves, and serves until it is ended.
It answers only what a look at an empty folder needs
(linux/fuse.h, protocol 7.31).
"""

import ctypes
import errno
import os
import struct
import sys

IN_HEADER = struct.Struct("<IIQQIIII")
OUT_HEADER = struct.Struct("<IiQ")
GETATTR, STATFS, RELEASEDIR, INIT, OPENDIR, READDIR, FORGET = 3, 17, 29, 26, 27, 28, 2
READ_BYTES = 64 * 1024
CLONE_NEWNS = 0x20000


def attributes():
    """fuse_attr_out of the one folder, valid for no time."""
    attr = struct.pack("<6Q10I", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o040755, 2, 0, 0, 0, 4096, 0)
    return struct.pack("<QII", 0, 0, 0) + attr


def answer(opcode):
    """Body of the answer, or None for an unknown request."""
    return {
        INIT: struct.pack("<IIIIHHIIHH8I", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, *[0] * 8),
        GETATTR: attributes(),
        STATFS: struct.pack("<5Q4I6I", 0, 0, 0, 0, 0, 4096, 255, 4096, 0, *[0] * 6),
        OPENDIR: struct.pack("<QII", 1, 0, 0),
        READDIR: b"",
        RELEASEDIR: b"",
    }.get(opcode)


def main(pid, folder):
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/mnt") as space:
        if libc.setns(space.fileno(), CLONE_NEWNS) != 0:
            sys.exit(f"cannot enter the mount space: {os.strerror(ctypes.get_errno())}")
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"tiny", folder.encode(), b"fuse", 0, options) != 0:
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    print("mounted", flush=True)
    while True:
        try:
            request = os.read(fd, READ_BYTES)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return
            raise
        _, opcode, unique, *_ = IN_HEADER.unpack_from(request)
        if opcode == FORGET:
            continue
        body = answer(opcode)
        code = -errno.ENOSYS if body is None else 0
        body = body or b""
        os.write(fd, OUT_HEADER.pack(OUT_HEADER.size + len(body), code, unique) + body)


if __name__ == "__main__":
    main(*sys.argv[1:])
