from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.core.errors import DeadlineExceeded, HostNotReady, Internal, Unavailable
from agentenv.host import process
from agentenv.host.process import ProcessId

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


@pytest.fixture
def started() -> Iterator[list[ProcessId]]:
    """Processes to end after the test."""
    started: list[ProcessId] = []
    yield started
    for one in started:
        process.kill(one)


def _spawn(started: list[ProcessId], folder: Path, *argv: str) -> ProcessId:
    one = process.spawn(argv, folder / "log", folder)
    started.append(one)
    return one


def _state(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None
    return stat.rpartition(")")[2].split()[0]


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _open_files(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found.append(str(entry.readlink()))
    return sorted(found)


def test_a_spawned_program_is_on_its_own_and_logs(started: list[ProcessId], tmp_path: Path) -> None:
    one = _spawn(started, tmp_path, "sh", "-c", "echo out; echo err >&2; read x; pwd; exec sleep 60")
    deadline = time.monotonic() + 30
    while "/" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert (tmp_path / "log").read_text() == f"out\nerr\n{tmp_path}\n"
    assert os.getsid(one.pid) == one.pid != os.getsid(0)
    assert process.is_alive(one)
    wanted = sorted(["/dev/null", str(tmp_path / "log"), str(tmp_path / "log")])
    while _open_files(one.pid) != wanted and time.monotonic() < deadline:
        time.sleep(0.005)  # its loader has a library open for a moment
    assert _open_files(one.pid) == wanted


def test_a_spawned_program_outlives_its_starter(started: list[ProcessId], tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from agentenv.host import process
one = process.spawn(["sleep", "60"], Path({str(tmp_path)!r}) / "log", Path({str(tmp_path)!r}))
print(one.pid, one.start_ticks, flush=True)
import os, signal; os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == -9, done.stderr
    one = ProcessId(*map(int, done.stdout.split()))
    started.append(one)
    assert process.is_alive(one)


@pytest.mark.parametrize("argv", [["no-such-program-here"], ["/etc/passwd"]])
def test_a_program_that_cannot_start_is_named(tmp_path: Path, argv: list[str]) -> None:
    with pytest.raises(HostNotReady, match=argv[0]):
        process.spawn(argv, tmp_path / "log", tmp_path)


@pytest.mark.parametrize("argv", [["/bin/true"], ["/bin/sh", "-c", "kill -KILL $$"]])
def test_a_program_that_ended_before_it_was_seen_may_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    """As by a kill under a start of a VMM: no fault of ours."""
    monkeypatch.setattr(process, "start_ticks", lambda _pid: None)
    with pytest.raises(Unavailable, match="ended at once") as ended:
        process.spawn(argv, tmp_path / "log", tmp_path)
    assert "try again" in ended.value.hint
    assert str(tmp_path / "log") in ended.value.hint


def test_a_missing_working_folder_is_not_taken_for_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(HostNotReady, match="nowhere"):
        process.spawn(["true"], tmp_path / "log", tmp_path / "nowhere")


def test_a_recycled_pid_is_not_ours(started: list[ProcessId], tmp_path: Path) -> None:
    one = _spawn(started, tmp_path, "sleep", "60")
    former = ProcessId(one.pid, one.start_ticks - 1)
    assert not process.is_alive(former)
    assert process.open_pidfd(former) is None
    process.kill(former)
    assert process.is_alive(one), "someone else's process was killed"


def test_names_with_spaces_and_parentheses_are_read_right(started: list[ProcessId], tmp_path: Path) -> None:
    script = tmp_path / "a) S (b"
    script.write_text("#!/bin/sh\nread x < /dev/zero\nsleep 60\n")
    script.chmod(0o755)
    one = _spawn(started, tmp_path, str(script))
    assert process.start_ticks(one.pid) == one.start_ticks


def test_kill_ends_what_ignores_sigterm_and_leaves_no_zombie(started: list[ProcessId], tmp_path: Path) -> None:
    one = _spawn(started, tmp_path, sys.executable, "-c", STUBBORN)
    deadline = time.monotonic() + 10
    while "ready" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill(one, term_first_s=0.05)
    assert not process.is_alive(one)
    assert _state(one.pid) is None
    process.kill(one)


def test_kill_lets_a_program_leave_by_itself(started: list[ProcessId], tmp_path: Path) -> None:
    one = _spawn(started, tmp_path, "sh", "-c", "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.01; done")
    deadline = time.monotonic() + 5
    while "ready" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill(one, term_first_s=5.0)
    assert (tmp_path / "log").read_text() == "ready\nbye\n"


async def test_the_end_of_a_child_is_seen_and_reaped(started: list[ProcessId], tmp_path: Path) -> None:
    one = _spawn(started, tmp_path, "sleep", "60")
    waiting = [asyncio.create_task(process.wait_ended(one)) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    await asyncio.to_thread(process.kill, one)
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert _state(one.pid) is None
    await asyncio.wait_for(process.wait_ended(one), 1)


async def test_the_end_of_someone_elses_child_is_seen() -> None:
    parent = await asyncio.create_subprocess_exec(
        "sh", "-c", "sleep 60 & echo $!; wait", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    ticks = process.start_ticks(pid)
    assert ticks is not None
    waiting = asyncio.create_task(process.wait_ended(ProcessId(pid, ticks)))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    process.kill(ProcessId(pid, ticks))
    await asyncio.wait_for(waiting, 5)
    await parent.wait()


async def test_a_cancelled_wait_leaves_no_descriptor(started: list[ProcessId], tmp_path: Path) -> None:
    one = _spawn(started, tmp_path, "sleep", "60")
    before = _descriptors()
    for _ in range(20):
        waiting = asyncio.create_task(process.wait_ended(one))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert _descriptors() == before


def test_run_gives_output_or_says_what_went_wrong() -> None:
    assert process.run(["cat"], 5, "hello") == "hello"
    with pytest.raises(Internal, match="status 3: broken"):
        process.run(["sh", "-c", "echo broken >&2; exit 3"], 5)
    with pytest.raises(HostNotReady, match="no-such-program"):
        process.run(["no-such-program"], 5)
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        process.run(["sleep", "60"], 0.05)
