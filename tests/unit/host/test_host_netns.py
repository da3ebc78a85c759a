from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.core.errors import NotFound
from agentenv.host import netns, process

NAME = f"aenvtest-{os.getpid()}"


@pytest.fixture
def namespace(root: None) -> Iterator[str]:
    subprocess.run(["ip", "netns", "add", NAME], check=True)
    subprocess.run(["ip", "-n", NAME, "link", "set", "lo", "up"], check=True)
    yield NAME
    subprocess.run(["ip", "netns", "del", NAME], check=True)


def _here() -> int:
    return Path("/proc/thread-self/ns/net").stat().st_ino


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_socket_belongs_to_the_namespace_and_the_thread_comes_back(namespace: str) -> None:
    home = _here()
    sock = netns.tcp_socket(namespace)
    assert _here() == home
    assert not sock.getblocking()
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    sock.setblocking(True)
    with sock, socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="refused") as caught:
        sock.connect(listener.getsockname())  # it listens on our loopback, not on that of the namespace
    assert caught.value.errno == errno.ECONNREFUSED


def test_the_thread_comes_back_from_a_failing_body(namespace: str) -> None:
    home, descriptors = _here(), _descriptors()

    def fail_inside() -> None:
        with netns.entered(namespace):
            assert _here() == (netns.ROOT / namespace).stat().st_ino != home
            raise ZeroDivisionError

    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            fail_inside()
    assert (_here(), _descriptors()) == (home, descriptors)


def test_a_program_is_started_inside(namespace: str, tmp_path: Path) -> None:
    one = process.spawn(["sleep", "60"], tmp_path / "log", tmp_path, namespace)
    try:
        assert Path(f"/proc/{one.pid}/ns/net").stat().st_ino == (netns.ROOT / namespace).stat().st_ino
    finally:
        process.kill(one)


def test_names_and_absence(namespace: str) -> None:
    assert netns.exists(namespace)
    assert netns.names(NAME) == [namespace]
    assert netns.names("no-such-prefix-") == []
    with pytest.raises(NotFound, match="nowhere"):
        netns.tcp_socket("nowhere")
