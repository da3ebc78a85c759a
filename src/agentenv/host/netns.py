"""Network namespaces: enter one for a moment, make sockets and processes in it.

A thread enters, acts and leaves within one call and never awaits in between; sockets and children made inside keep
the namespace. If a thread cannot go back, the process must not go on with it: that is a RuntimeError.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from agentenv.core.errors import NotFound

ROOT = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _setns(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Run the body with the calling thread in namespace `name`. NotFound when there is none."""
    try:
        target = os.open(ROOT / name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"network namespace {name} does not exist") from error
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _setns(target)
        try:
            yield
        finally:
            try:
                _setns(home)
            except OSError as error:
                raise RuntimeError(f"a thread is lost in network namespace {name}") from error
    finally:
        os.close(target)
        os.close(home)


def tcp_socket(name: str) -> socket.socket:
    """A non-blocking TCP socket that lives in namespace `name`; the caller owns it. Takes microseconds."""
    with entered(name):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def exists(name: str) -> bool:
    """Whether namespace `name` exists."""
    return (ROOT / name).exists()


def number(name: str) -> int:
    """What tells namespace `name` from any other that exists at the same time, of whatever name; 0 when there is none."""
    try:
        return (ROOT / name).stat().st_ino
    except FileNotFoundError:
        return 0


def names(prefix: str) -> list[str]:
    """Names of the namespaces that start with `prefix`."""
    return sorted(entry.name for entry in ROOT.glob(prefix + "*")) if ROOT.is_dir() else []
