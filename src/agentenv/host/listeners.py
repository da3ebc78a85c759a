"""Listening sockets: those this process was handed, and who holds a port (best effort, for error messages)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, MutableMapping
from pathlib import Path

_LISTEN_STATE = "0A"
_FIRST_FD = 3  # sd_listen_fds(3)


def from_service_manager(environ: MutableMapping[str, str] | None = None) -> list[socket.socket]:
    """The listening sockets that systemd has kept for this process; owned by the caller, and told once only."""
    environ = os.environ if environ is None else environ
    told = {name: environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if told["LISTEN_PID"] != str(os.getpid()) or not told["LISTEN_FDS"].isdigit():
        return []
    return adopt(range(_FIRST_FD, _FIRST_FD + int(told["LISTEN_FDS"])))


def adopt(descriptors: Iterable[int]) -> list[socket.socket]:
    """Those of the descriptors that are listening TCP sockets, as objects that own them; other sockets are closed, other files left."""
    found = []
    for fd in descriptors:
        try:
            sock = socket.socket(fileno=fd)
        except OSError:
            continue  # not open, or no socket
        os.set_inheritable(fd, False)
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.setblocking(False)
            found.append(sock)
        else:
            sock.close()
    return found


def pick(listeners: list[socket.socket], host: str, port: int) -> list[socket.socket]:
    """Take those out of `listeners` that listen where the settings say; they are the caller's."""
    if not listeners:
        return []
    addresses = {entry[4][0] for entry in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)}
    picked = [sock for sock in listeners if sock.getsockname()[1] == port and sock.getsockname()[0] in addresses]
    listeners[:] = [sock for sock in listeners if sock not in picked]
    return picked


def describe_holder(port: int) -> str:
    """`name (pid N)` of the process that listens on `port` in this network namespace, or an empty string."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, wanted):
            try:
                name = (process / "comm").read_text().strip()
            except OSError:
                continue
            return f"{name} (pid {process.name})"
    return ""


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[3] == _LISTEN_STATE and int(columns[1].rsplit(":", 1)[1], 16) == port:
                found.add(columns[9])
    return found


def _holds(process: Path, wanted: set[str]) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if str(descriptor.readlink()) in wanted:
                return True
        except OSError:
            continue
    return False
