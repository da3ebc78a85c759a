"""The parent of all workers: a process with the costly imports done, which forks a worker for each context.

It talks with the server over one Unix socket of whole messages (SOCK_SEQPACKET), the first open descriptor it is given:

    server -> {"start": {"argv": [...] or null, "cwd": "...", "environment": {...}}}  + 4 descriptors: fd 3, 4, 1, 2 of the worker
    spawner -> {"started": pid} or {"failed": "why"}
    spawner -> {"exited": pid, "status": as of waitpid}

`argv` null means a Python worker. Invariants: it runs in one thread, so forking it is sound; it ends when the server ends, and
every worker ends when it ends; each worker leads a session of its own, so that it can be ended with all its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

_MESSAGE_MAX_BYTES = 256 << 10
_PR_SET_PDEATHSIG = 1
_WORKER_OOM_SCORE = "500"  # a cell that eats all memory dies, not the server


def main(socket_fd: int, preload: tuple[str, ...]) -> None:
    """Serve until the server closes its end."""
    _die_with_parent()
    connection = socket.socket(fileno=socket_fd)
    from . import python_worker

    shell = python_worker.make_shell()
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    python_worker.prepare(shell)
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _send(connection, {"ready": os.getpid()})
    while True:
        readable, _, _ = select.select([socket_fd, wake_r], [], [])
        if wake_r in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_r, 4096)
            _reap(connection)
        if socket_fd in readable:
            message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_MAX_BYTES, 4)
            if not message:
                return
            _start(connection, json.loads(message)["start"], descriptors, shell, (wake_r, wake_w))


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.send(json.dumps(message).encode())


def _reap(connection: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _send(connection, {"exited": pid, "status": status})


def _start(connection: socket.socket, wanted: dict[str, Any], descriptors: list[int], shell: Any, ours: tuple[int, int]) -> None:
    try:
        pid = os.fork()
    except OSError as problem:
        _send(connection, {"failed": f"no new process can be made: {problem.strerror}"})
        pid = -1
    if pid == 0:
        try:
            connection.close()
            _become_worker(wanted, descriptors, shell, ours)
        except BaseException as problem:  # noqa: BLE001  # this is a copy of the spawner: it must end here, whatever happened
            os.write(2, f"the worker could not start: {problem!r}\n".encode())
        finally:
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    if pid > 0:
        _send(connection, {"started": pid})


def _become_worker(wanted: dict[str, Any], descriptors: list[int], shell: Any, ours: tuple[int, int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in ours:
        os.close(descriptor)
    os.setsid()
    _die_with_parent()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(_WORKER_OOM_SCORE)
    # First away from the low numbers, so that no descriptor is overwritten before it was moved.
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, place in zip(moved, (3, 4, 1, 2), strict=True):
        os.dup2(descriptor, place, inheritable=True)
        os.close(descriptor)
    null = os.open("/dev/null", os.O_RDONLY)
    if null != 0:
        os.dup2(null, 0, inheritable=True)
        os.close(null)
    os.chdir(wanted["cwd"])
    if wanted["argv"] is None:
        from . import python_worker

        os.environ.clear()
        os.environ.update(wanted["environment"])
        python_worker.run(shell)
    else:
        os.execvpe(wanted["argv"][0], wanted["argv"], wanted["environment"])


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def entry() -> None:
    """Called by the server as `... <socket fd> <module,module,...>`."""
    main(int(sys.argv[-2]), tuple(name for name in sys.argv[-1].split(",") if name))
