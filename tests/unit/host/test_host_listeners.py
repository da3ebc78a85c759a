"""Listening sockets that are handed over, and the words with a service manager."""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.host import listeners
from agentenv.host.notify import notify


def test_only_listening_tcp_sockets_are_adopted_and_the_rest_is_closed(tmp_path: Path) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    idle, unix = socket.socket(), socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "s"))
    unix.listen()
    plain = os.open(tmp_path, os.O_RDONLY)
    closed = os.dup(plain)
    os.close(closed)
    descriptors = [one.detach() for one in (listening, idle, unix)]
    [found] = listeners.adopt([*descriptors, plain, closed])
    with found:
        assert found.getsockname()[1] == port
        assert not found.get_inheritable()
    for fd in descriptors[1:]:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    os.close(plain)  # a stranger's file is left alone


def test_those_that_fit_the_settings_are_picked() -> None:
    have = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    port = have[0].getsockname()[1]
    left = list(have)
    assert listeners.pick(left, "127.0.0.2", port) == []
    assert left == have
    assert listeners.pick(left, "127.0.0.1", port) == have[:1]
    assert left == have[1:]
    for sock in have:
        sock.close()


def test_what_systemd_kept_is_told_once_and_only_to_whom_it_is_for() -> None:
    script = """
import os, socket
from agentenv.host.listeners import from_service_manager
os.environ["LISTEN_PID"] = str(os.getpid())
found = from_service_manager()
print([sock.getsockname()[1] for sock in found], from_service_manager(), "LISTEN_FDS" in os.environ)
os.environ.update(LISTEN_PID=str(os.getpid() + 1), LISTEN_FDS="1")
print(from_service_manager())
"""
    with socket.create_server(("127.0.0.1", 0)) as kept:
        words = [sys.executable, "-c", f"import os; os.dup2({kept.fileno()}, 3); exec({script!r})"]
        done = subprocess.run(
            words, env={**os.environ, "LISTEN_FDS": "1"}, pass_fds=[kept.fileno()], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"[{kept.getsockname()[1]}] [] False\n[]\n"


@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_manager_is_told_and_given_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = "@aenv-test-notify" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, socket.create_server(("127.0.0.1", 0)) as kept:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        assert notify("READY=1", "MAINPID=7", descriptors=[kept.fileno()])
        text, rights, _, _ = manager.recvmsg(100, 100)
        assert text == b"READY=1\nMAINPID=7"
        given = array.array("i", rights[0][2])
        with socket.socket(fileno=given[0]) as copy:
            assert copy.getsockname() == kept.getsockname()


def test_without_a_service_manager_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert not notify("READY=1")
