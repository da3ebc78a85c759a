"""What a kill and a deadline reach, what flow control holds back, what the reaper collects."""

import base64
import os
import subprocess
import time
from pathlib import Path

import pytest
from envd_rig import Envd


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_dead(pids, limit_s=3):
    deadline = time.monotonic() + limit_s
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if alive(pid)]
        time.sleep(0.02)


def kill(envd, pid):
    return envd.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})[0]


# Each prints the pid of a child that a kill of the shell alone would leave behind.
ESCAPES = {
    "plain": "sleep 300 & echo $!; wait",
    "nohup": "nohup sleep 300 >/dev/null & echo $!; wait",
    "session": "setsid sh -c 'echo $$; exec sleep 300' & wait",
    "deaf": "sh -c 'trap \"\" TERM; echo $$; sleep 300; sleep 300' & wait",
}
DOUBLE_FORK = "(setsid sh -c 'echo $$; exec sleep 300' &) ; sleep 300"


def first_line(stream):
    return int(base64_data(stream.next()))


def base64_data(event):
    return base64.b64decode(event["data"]["stdout"])


@pytest.mark.parametrize("name", ESCAPES)
def test_kill_takes_the_tree(envd, name):
    stream = envd.shell(ESCAPES[name])
    pid, child = stream.pid(), first_line(stream)
    before = time.monotonic()
    assert kill(envd, pid) == 200
    assert time.monotonic() - before < 1
    wait_dead([pid, child])
    assert stream.result().end["status"] == "signal: killed"
    assert kill(envd, pid) == 404


def test_nothing_of_a_killed_tree_goes_on(envd, tmp_path):
    """Neither the shell, whose `wait` would end well, nor those below it, which have another command to run."""
    below = "; ".join(f"(sleep 300; touch {tmp_path}/{number}) &" for number in range(20)).replace("&;", "&")
    for _ in range(5):
        stream = envd.shell(f"{below} echo $$; wait; touch {tmp_path}/shell", user="root")
        pid = stream.pid()
        assert first_line(stream) == pid
        assert kill(envd, pid) == 200
        assert stream.result().end["status"] == "signal: killed"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [*ESCAPES.values(), DOUBLE_FORK], ids=[*ESCAPES, "double-fork"])
def test_deadline_takes_the_tree_by_cgroup(cgrouped, command):
    """Case A03."""
    stream = cgrouped.shell(command, headers={"Connect-Timeout-Ms": "700"})
    pid, child = stream.pid(), first_line(stream)
    before = time.monotonic()
    error = stream.error()
    assert error["code"] == "deadline_exceeded"
    assert 0.3 < time.monotonic() - before < 2
    wait_dead([pid, child])
    cgrouped.wait_gone(pid)  # the stream tells of the end a moment before the list does
    assert cgrouped.pids() == set()


def test_background_work_outlives_a_command_that_ends_by_itself(cgrouped):
    child = int(cgrouped.run("setsid nohup sleep 300 >/dev/null 2>&1 & echo $!").stdout)
    assert alive(child)
    groups = [path.name for path in cgrouped.cgroup.iterdir() if path.is_dir()]
    assert len(groups) == 1
    os.kill(child, 9)
    wait_dead([child])
    # Its group is cleared away when the next one is made.
    cgrouped.run("true")
    assert groups[0] not in [path.name for path in cgrouped.cgroup.iterdir()]


def test_deadline_holds_when_the_client_left(envd):
    """Case A06: the limit is the command's, not the connection's."""
    stream = envd.shell("sleep 300", headers={"Connect-Timeout-Ms": "800"})
    pid = stream.pid()
    stream.close()
    time.sleep(0.2)
    assert pid in envd.pids()
    envd.wait_gone(pid, 3)


def test_deadline_of_connect_ends_the_stream_only(envd):
    stream = envd.shell("sleep 2")
    pid = stream.pid()
    follower = envd.open("process.Process/Connect", {"process": {"pid": pid}}, headers={"Connect-Timeout-Ms": "300"})
    assert follower.error()["code"] == "deadline_exceeded"
    assert pid in envd.pids()
    assert stream.result().code == 0


def test_no_deadline_without_the_header(envd):
    assert envd.run("sleep 1.2; echo ok", headers={}).stdout == b"ok\n"


def test_term_reaches_the_process_alone(envd):
    stream = envd.shell("trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done")
    pid = stream.pid()
    assert base64_data(stream.next()) == b"ready\n"
    assert envd.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"}) == (200, {})
    result = stream.result()
    assert (result.stdout, result.code) == (b"ready\ncaught\n", 5)


def test_a_reader_that_stops_makes_the_writer_wait(envd):
    """Cases A12 and A04: memory stays bounded, others are not disturbed, kill works at once."""
    stream = envd.start("/usr/bin/yes")
    pid = stream.pid()
    stream.next()
    time.sleep(1)
    before_bytes = envd.rss_bytes()
    before_ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    time.sleep(2)
    after_ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    assert after_ticks - before_ticks <= 2, "the writer ran on"
    assert envd.rss_bytes() - before_bytes < 1 << 20
    times = []
    for _ in range(20):
        at = time.monotonic()
        assert envd.run("echo ok").stdout == b"ok\n"
        times.append(time.monotonic() - at)
    assert sorted(times)[10] < 2  # seconds: one that waited for the other would wait for ever
    at = time.monotonic()
    assert kill(envd, pid) == 200
    assert time.monotonic() - at < 1
    envd.wait_gone(pid, 2)
    assert kill(envd, pid) == 404
    stream.close()


def test_output_without_followers_is_dropped(envd):
    stream = envd.shell("yes | head -c 200000000; touch /tmp/envd-drop-$$; rm /tmp/envd-drop-$$")
    pid = stream.pid()
    stream.close()
    envd.wait_gone(pid, 30)
    assert envd.rss_bytes() < 64 << 20


def test_a_slow_follower_does_not_lose_bytes(envd):
    stream = envd.shell("seq 1 60000")
    stream.pid()
    time.sleep(1)
    assert stream.result().stdout.split()[-1] == b"60000"


def zombies(parent):
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        count += fields[0] == "Z" and int(fields[1]) == parent
    return count


def test_orphans_leave_no_zombies(envd):
    """Case A13."""
    script = """
import os
for _ in range(200):
    for _ in range(100):
        pid = os.fork()
        if pid == 0:
            if os.fork() == 0:
                os._exit(3)
            os._exit(0)
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
"""
    result = envd.start("python3", "-c", script, user="root", timeout_s=200).result()
    assert result.code == 0, result.stderr
    deadline = time.monotonic() + 2
    while (left := zombies(envd.child.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == 0
    assert envd.run("exit 4").code == 4


def test_orphans_that_end_at_once_leave_no_zombies(envd):
    script = """
import os, signal
go = os.pipe()
for _ in range(2000):
    if os.fork() == 0:
        if os.fork() == 0:
            os.close(go[1])
            os.read(go[0], 1)
            os._exit(3)
        os._exit(0)
try:
    while True:
        os.waitpid(-1, 0)
except ChildProcessError:
    pass
os.close(go[1])
"""
    result = envd.start("python3", "-c", script, user="root", timeout_s=120).result()
    assert result.code == 0, result.stderr
    deadline = time.monotonic() + 3
    while (left := zombies(envd.child.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == 0


def test_user_cannot_kill_the_agent(envd):
    """Case A19."""
    envd.run("kill -9 -1", user="31337")
    assert envd.child.poll() is None
    assert envd.run("echo ok").stdout == b"ok\n"


def test_term_ends_the_agent_cleanly(binary):
    running = Envd(binary)
    running.child.terminate()
    assert running.child.wait(10) == 0


def test_the_agent_names_a_port_in_use(binary, envd):
    done = subprocess.run([str(binary), "--no-init", "--port", str(envd.port)], capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 1
    assert f"cannot serve 127.0.0.1:{envd.port}" in done.stderr
