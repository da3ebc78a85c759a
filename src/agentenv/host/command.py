"""Blocking child programs with a deadline and bounded memory.

Owns: starting a helper program in its own process group, ending the whole group when the deadline passes, and turning
each way to fail into one of our errors. Invariants: nothing started here outlives the call; at most
`MAX_OUTPUT_BYTES` of output are kept. For the long-lived programs (VMM, storage daemon) see their supervisors.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from agentenv.core.errors import DeadlineExceeded, HostNotReady, Internal

Progress = Callable[[str, int | None, int | None], None]
"""Called as `progress(step, done, total)`. The step text names the unit ("... (bytes)", "... (percent)");
`done` and `total` are None while they are not known."""

MAX_OUTPUT_BYTES = 64 << 20
"""Most output kept of one command: `apt-cache` of a whole suite stays below; more is a fault."""

ERROR_TAIL_CHARS = 1500
"""How much of a failed command's stderr goes into the error: enough for the cause, short enough for a terminal."""


def no_progress(step: str, done: int | None, total: int | None) -> None:
    """A `Progress` that shows nothing."""


def run_command(
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: BinaryIO | None = None,
    on_status: Callable[[Iterator[str]], None] | None = None,
    hint: str = "",
) -> str:
    """Run `argv` to its end and return its standard output as text.

    `env` adds to the environment. With `on_status` the child gets one more descriptor, named by the environment
    variable STATUS_FD and by every `{status_fd}` in `argv`; the callback reads its lines as they come.
    Raises HostNotReady (no such program), DeadlineExceeded (its whole process group is killed first) or
    Internal (exit status other than 0; the message has the end of stderr).
    """
    words = [str(word) for word in argv]
    name = Path(words[0]).name
    status_read, status_write = os.pipe() if on_status else (-1, -1)
    words = [word.replace("{status_fd}", str(status_write)) for word in words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                words,
                cwd=cwd,
                env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
                stdin=stdin if stdin is not None else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=(status_write,) if on_status else (),
                start_new_session=True,
            )
        except OSError as error:
            for descriptor in (status_read, status_write):
                if descriptor >= 0:
                    os.close(descriptor)
            raise HostNotReady(f"cannot start {name}: {error.strerror}", hint or "see `aenv doctor` for what the host lacks") from error
        if on_status:
            os.close(status_write)
        with _reaped(child):
            if on_status:
                _follow(status_read, on_status, child, timeout_s)
            try:
                status = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise DeadlineExceeded(f"{name} did not finish within {timeout_s:g} s", hint) from None
        if status != 0:
            raise Internal(f"{name} failed with status {status}: {_tail(err)}", hint)
        out.seek(0)
        return out.read(MAX_OUTPUT_BYTES).decode(errors="replace")


class _reaped:
    """Leaves no process of the child's group behind, whichever way the block ends."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()


def _follow(descriptor: int, on_status: Callable[[Iterator[str]], None], child: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Read status lines on this thread; a timer ends the child, and with it the pipe, at the deadline."""
    import threading

    def expire() -> None:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)

    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    expired_from = timer
    try:
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as lines:
            on_status(line.rstrip("\n") for line in lines)
    finally:
        expired_from.cancel()


def _tail(stream: BinaryIO) -> str:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - 4 * ERROR_TAIL_CHARS))
    text = stream.read().decode(errors="replace").strip()
    return text[-ERROR_TAIL_CHARS:] or "no message"
