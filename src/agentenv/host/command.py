"""Blocking child programs with a deadline and bounded output.

Owns: starting a helper program in its own process group, ending the whole group when the deadline passes, and turning
each way to fail into one of our errors. Invariants: no process of the group outlives a call that fails or is
interrupted; output is kept up to a limit. Long-lived programs (VMM, storage daemon) have supervisors
of their own.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from agentenv.core.errors import DeadlineExceeded, HostNotReady, Internal, StorageFull
from agentenv.host.cgroup import set_oom_score

Progress = Callable[[str, int | None, int | None], None]
"""Called as `progress(step, done, total)`: `step` is a short text that ends in the unit when there are figures,
as in "fetch kernel (bytes)"; `done` and `total` are None while they are not known."""

MAX_OUTPUT_BYTES = 64 << 20
"""Most output kept of one command unless told otherwise; what our tools print is far below."""

ERROR_TAIL_CHARS = 1500
"""How much of a failed command's stderr goes into the error: enough for the cause, short enough for a terminal."""

_FULL_DISK = ("no space left on device", "disk quota exceeded")
"""How every program words ENOSPC and EDQUOT in the C locale, by the C library or by Go's."""

WATCH_INTERVAL_S = 0.2
"""How often `watch` runs: a progress bar that moves five times a second looks alive and costs nothing."""


def no_progress(step: str, done: int | None, total: int | None) -> None:
    """A `Progress` that shows nothing."""


def run_command(
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: BinaryIO | None = None,
    watch: Callable[[], None] | None = None,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
    hint: str = "",
) -> bytes:
    """Run `argv` to its end and return its standard output (the caller decodes text).

    `env` is added to this process's environment; `watch` is called every 0.2 s while the command runs (for progress).
    Raises HostNotReady (no such program), DeadlineExceeded (its process group is killed first), StorageFull (it says that it met a
    full disk) or Internal (exit status other than 0 for another reason; the message ends with the end of its stderr, or says that it
    printed too much). `hint` goes into each of them but StorageFull.
    """
    words = [str(word) for word in argv]
    name = Path(words[0]).name
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                words,
                cwd=cwd,
                env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
                stdin=stdin if stdin is not None else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            raise HostNotReady(f"cannot start {name}: {error.strerror}", hint or "`aenv doctor` lists what the host lacks") from error
        set_oom_score(child.pid, 0)  # ours is the server's alone
        try:
            status = _wait(child, name, timeout_s, watch, hint)
        finally:
            _end_group(child)
        if status != 0:
            said = _tail(err)
            if any(text in said.lower() for text in _FULL_DISK):
                raise StorageFull(f"{name} met a full disk: {said[-300:]}", "free some space; nothing was lost")
            raise Internal(f"{name} failed with status {status}: {said}", hint)
        size_bytes = out.seek(0, os.SEEK_END)
        if size_bytes > max_output_bytes:
            raise Internal(f"{name} printed {size_bytes} bytes, more than the {max_output_bytes} that are kept", hint)
        out.seek(0)
        return out.read()


def wait_readable(fd: int, seconds: float) -> bool:
    """Whether `fd` gets readable within that time; a pidfd does when its process has ended. No polling, so no delay."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    end = time.monotonic() + seconds
    while True:
        left_s = end - time.monotonic()
        if poller.poll(max(0.0, left_s * 1000)):
            return True
        if left_s <= 0:
            return False


def _wait(child: subprocess.Popen[bytes], name: str, timeout_s: float, watch: Callable[[], None] | None, hint: str) -> int:
    end = time.monotonic() + timeout_s
    pidfd = os.pidfd_open(child.pid)
    try:
        while True:
            left_s = end - time.monotonic()
            if wait_readable(pidfd, min(left_s, WATCH_INTERVAL_S) if watch else left_s):
                return child.wait()
            if time.monotonic() >= end:
                raise DeadlineExceeded(f"{name} did not finish within {timeout_s:g} s", hint)
            if watch:
                watch()
    finally:
        os.close(pidfd)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left. Only while the leader is unreaped is its group id surely ours."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _tail(stream: BinaryIO) -> str:
    size_bytes = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size_bytes - 4 * ERROR_TAIL_CHARS))
    text = stream.read().decode(errors="replace").strip()
    return text[-ERROR_TAIL_CHARS:] or "it said nothing"
