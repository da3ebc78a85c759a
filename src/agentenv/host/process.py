"""Processes that outlive the server: start, name for good, watch, end.

A process is named by `(pid, start time)`, so a recycled pid is never taken for ours. Ending one goes through a pidfd.
Everything started here is its own session with no pipe to us: it goes on when the server is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.errors import DeadlineExceeded, HostNotReady, Unavailable
from agentenv.host import netns
from agentenv.host.cgroup import set_oom_score
from agentenv.host.command import run_command, wait_readable

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for good: its pid and when it started, in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """When `pid` started, or None when it is gone or only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs."""
    return start_ticks(process.pid) == process.start_ticks


def spawn(
    argv: Sequence[str],
    log: Path,
    cwd: Path,
    namespace: str | None = None,
    env: Mapping[str, str] | None = None,
    output: int | None = None,
    keep: Sequence[int] = (),
) -> ProcessId:
    """Start a detached program with stdout and stderr appended to `log`, or to the open file `output`, which stays the caller's.

    `namespace` names a network namespace it runs in; it gets the open files `keep` under the same numbers. The child is made by vfork
    (no pre-exec code), so the cost does not grow with our memory. Blocks for about a millisecond: call it from a worker thread.
    HostNotReady: no such program. Unavailable: it ended before it could be looked at.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(log.open("ab")) if output is None else output
        if namespace is not None:
            stack.enter_context(netns.entered(namespace))
        try:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=cwd,
                env=None if env is None else dict(env),
                start_new_session=True,
                pass_fds=tuple(keep),
            )
        except OSError as error:  # of the program or of `cwd`: the error names which
            cause = f"{error.strerror}: {error.filename}"
            raise HostNotReady(f"{argv[0]} cannot be started: {cause}", "run `aenv doctor` to see what is missing") from error
    set_oom_score(child.pid, 0)  # ours is the server's alone
    ticks = start_ticks(child.pid)
    child.returncode = 0  # the child outlives us by design: Popen must not warn about, or wait for, it
    if ticks is None:
        reap(child.pid)
        raise Unavailable(f"{argv[0]} ended at once", f"it may have been killed: try again; if it repeats, see {log}")
    return ProcessId(child.pid, ticks)


def reap(pid: int) -> None:
    """Collect the exit status if `pid` is a child of ours that has ended; anything else is left alone."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def open_pidfd(process: ProcessId) -> int | None:
    """A pidfd of the process, owned by the caller, or None when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if not is_alive(process):
        os.close(fd)
        reap(process.pid)
        return None
    return fd


def kill(process: ProcessId, deadline_s: float = 10.0, term_first_s: float = 0.0) -> None:
    """End the process and wait until it is gone; no error when it is gone already.

    With `term_first_s` it gets SIGTERM and that long to leave by itself. Blocks. DeadlineExceeded when it survives SIGKILL.
    """
    fd = open_pidfd(process)
    if fd is None:
        return
    try:
        if term_first_s > 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGTERM)
            if wait_readable(fd, term_first_s):
                return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        if not wait_readable(fd, deadline_s):
            raise DeadlineExceeded(
                f"process {process.pid} still exists {deadline_s:g} s after SIGKILL", "it hangs in the kernel; see dmesg"
            )
    finally:
        os.close(fd)
        reap(process.pid)


async def wait_ended(process: ProcessId) -> None:
    """Return when the process is gone (child of ours or not). No deadline: the caller owns and cancels this."""
    fd = open_pidfd(process)
    if fd is None:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
        reap(process.pid)


def working_below(folder: Path) -> dict[Path, ProcessId]:
    """Every process on the machine whose working folder is directly below `folder`, by that folder.

    One in a jail works in `/` for all that it can see; its root file system has the folder's name instead.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            working = (entry / "cwd").readlink()
            if working == Path("/"):
                working = _name_of_root((entry / "mountinfo").read_text())
        except (OSError, UnicodeDecodeError):
            continue
        if working.parent == folder and (ticks := start_ticks(int(entry.name))) is not None:
            found[working] = ProcessId(int(entry.name), ticks)
    return found


def _name_of_root(mountinfo: str) -> Path:
    """What the file system at `/` was mounted from; see proc_pid_mountinfo(5)."""
    for line in mountinfo.splitlines():
        place, _, rest = line.partition(" - ")
        if place.split()[4] == "/":
            return Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), rest.split()[1]))
    return Path("/")


def run(argv: Sequence[str], deadline_s: float, input_text: str | None = None) -> str:
    """Run a short command to its end and return its stdout. Blocks. Fails as `run_command` does."""
    with contextlib.ExitStack() as stack:
        stdin = None
        if input_text is not None:
            stdin = stack.enter_context(tempfile.TemporaryFile())
            stdin.write(input_text.encode())
            stdin.seek(0)
        return run_command(argv, timeout_s=deadline_s, stdin=stdin).decode(errors="replace")
