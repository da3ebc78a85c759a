"""Commands in real guests: output, ends, trees, users, terminals, and an agent that outlives what runs beside it (cases A)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time

import pytest
from e2b import AuthenticationException, CommandExitException, InvalidArgumentException, PtySize, Sandbox, TimeoutException
from guest_programs import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def box(node):
    """One sandbox for what leaves no trace in it."""
    made = Sandbox.create("base", timeout=1800, **node.options)
    yield made
    made.kill()


def alive(box, marker: str) -> list[str]:
    """Pids whose command line holds a marker."""
    return box.commands.run(f"pgrep -f '[{marker[0]}]{marker[1:]}' || true", user="root").stdout.split()


def wait_gone(box, marker: str) -> None:
    wait_for(lambda: not alive(box, marker), f"{marker} still runs")


# --- A01 ---------------------------------------------------------------------------------------------------------------


def test_output_is_whole_and_before_the_end(box):
    def one(_: int):
        return box.commands.run("seq 1 20000; echo END >&2", timeout=120)

    with concurrent.futures.ThreadPoolExecutor(5) as lanes:
        for result in lanes.map(one, range(20)):
            assert len(result.stdout) == 108894
            assert result.stdout.endswith("\n20000\n")
            assert result.stderr == "END\n"


def test_a_child_that_keeps_the_pipe_does_not_hold_the_end(box):
    before = time.monotonic()
    assert box.commands.run("(sleep 97; echo late) & echo now").stdout == "now\n"
    assert time.monotonic() - before < PATIENCE_S
    assert alive(box, "sleep 97"), "the child went with its parent"
    box.commands.run("pkill -f '[s]leep 97'")


# --- A03, A06 ----------------------------------------------------------------------------------------------------------

TREES = {
    "plain": "sleep 811 & sleep 811",
    "nohup": "nohup sleep 812 >/dev/null 2>&1 & wait",
    "session": "setsid sleep 813 & wait",
    "double-fork": "(setsid sh -c 'sleep 814' &); sleep 814",
    "deaf": "bash -c 'trap \"\" TERM; sleep 815; sleep 815' & wait",
}


@pytest.mark.parametrize("name", TREES)
def test_a_deadline_takes_the_whole_tree(box, name):
    """The rule: a deadline that passes and SIGKILL take all the command started, in whatever session it is."""
    command = TREES[name]
    marker = "sleep " + command.split("sleep ")[1][:3]
    with pytest.raises(TimeoutException):
        box.commands.run(command, timeout=3)
    wait_gone(box, marker)
    assert not [process for process in box.commands.list() if marker in " ".join(process.args)]


def test_kill_takes_the_whole_tree_and_its_port(box):
    server = box.commands.run("(setsid python3 -m http.server 9000 >/dev/null 2>&1 &); sleep 816", background=True, timeout=0)
    wait_for(lambda: "9000" in box.commands.run("ss -ltn").stdout, "the server does not listen")
    assert box.commands.kill(server.pid) is True
    wait_for(lambda: ":9000 " not in box.commands.run("ss -ltn").stdout, "the port is still taken")
    assert box.commands.kill(server.pid) is False


def test_no_limit_means_none_and_a_client_that_leaves_changes_nothing(box):
    endless = box.commands.run("sleep 817", background=True, timeout=0)
    short = box.commands.run("sleep 818", background=True, timeout=4)
    endless.disconnect()
    short.disconnect()
    wait_gone(box, "sleep 818")
    assert alive(box, "sleep 817")
    assert endless.pid in [process.pid for process in box.commands.list()]
    box.commands.kill(endless.pid)


# --- A07, A09 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code", "output"),
    [
        ("cat", 0, ""),
        ("grep foo", 1, ""),
        ("read x; echo got:$x", 0, "got:\n"),
        ("sed s/a/b/", 0, ""),
        ("python3 -c 'import sys; print(len(sys.stdin.read()))'", 0, "0\n"),
        ("cat <<'EOF' | tail -n1\n" + "line\n" * 200 + "'$x' `y` \"z\"\nEOF", 0, "'$x' `y` \"z\"\n"),
        ("cat <<EOF\nnever closed", 0, "never closed\n"),
    ],
)
def test_input_is_empty_unless_asked_for(box, command, code, output):
    try:
        result = box.commands.run(command, timeout=30)
    except CommandExitException as failed:
        result = failed
    assert (result.exit_code, result.stdout) == (code, output)
    assert box.commands.run("echo ok").stdout == "ok\n"


# --- A12 ---------------------------------------------------------------------------------------------------------------


def test_a_reader_that_stops_makes_the_writer_wait(box):
    """Memory of the agent stays flat, other commands are served, and a kill works at once."""
    writer = box.commands.run("exec yes", background=True, timeout=0)
    next(iter(writer))  # and nothing more

    def written() -> str:
        return box.commands.run(f"grep wchar /proc/{writer.pid}/io", user="root").stdout

    def memory_kb() -> int:
        return int(box.commands.run("grep VmRSS /proc/1/status", user="root").stdout.split()[1])

    wait_for(lambda: written() == written(), "the writer runs on")
    before_kb = memory_kb()
    for _ in range(5):
        assert box.commands.run("echo ok").stdout == "ok\n"
    assert written() == written()
    assert memory_kb() - before_kb < 4096
    assert box.commands.kill(writer.pid) is True
    assert writer.pid not in [process.pid for process in box.commands.list()]


# --- A13 ---------------------------------------------------------------------------------------------------------------

ORPHANS = """
import os, sys
total, width = int(sys.argv[1]), int(sys.argv[2])
for _ in range(total // width):
    go = os.pipe()
    for _ in range(width):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.close(go[1])
                os.read(go[0], 1)
                os._exit(3)
            os._exit(0)
    for _ in range(width):
        os.wait()
    os.close(go[0]); os.close(go[1])
"""
ZOMBIES = "cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | grep -c '^Z' || true"


@pytest.mark.parametrize(("total", "width"), [(100, 1), (300, 150)], ids=["one-by-one", "at-once"])
def test_orphans_leave_no_zombies(box, total, width):
    box.files.write("orphans.py", ORPHANS)
    box.commands.run(f"python3 orphans.py {total} {width}", timeout=300)
    wait_for(lambda: box.commands.run(ZOMBIES).stdout.strip() == "0", "there are zombies")


# --- A15, A16 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def users(box):
    """Users as images have them: a home elsewhere, extra groups, a primary group of its own, no home at all."""
    script = """
set -e
groupadd -g 700 team; groupadd -g 701 more; groupadd -g 702 extra
useradd -u 12345 -g team -G more,extra -d /srv/app -m -s /bin/bash app
useradd -u 12346 -N -g users -d /nonexistent -M bare
"""
    box.commands.run(script, user="root")
    return box


def test_commands_and_terminals_agree_on_the_user(users):
    ask = "id -u; id -g; id -G | tr ' ' '\\n' | sort -n | xargs; echo $HOME $USER $LOGNAME; pwd; touch f && stat -c %U f"
    expected = {
        "app": ["12345", "700", "700 701 702", "/srv/app app app", "/srv/app", "app"],
        "root": ["0", "0", "0", "/root root root", "/root", "root"],
        "user": None,
    }
    for name, lines in expected.items():
        result = users.commands.run(ask, user=name, cwd="~")
        assert result.stderr == ""
        assert lines is None or result.stdout.splitlines() == lines
        terminal = users.pty.create(PtySize(rows=24, cols=200), user=name, cwd="~", timeout=60)
        users.pty.send_stdin(terminal.pid, f"stty -echo; PS1=; clear; echo; {ask}; exit\n".encode())
        shown = bytearray()
        terminal.wait(on_pty=shown.extend)
        text = shown.decode().replace("\r\n", "\n")
        assert result.stdout in text, name
        assert "denied" not in text
    assert users.commands.run("id -un").stdout == users.commands.run("id -un", user="user").stdout


def test_a_user_without_a_home_and_numbers_work(users):
    assert users.commands.run("id -un; pwd", user="bare", cwd="/").stdout == "bare\n/\n"
    assert users.commands.run("id -u; id -g", user="4321", cwd="/").stdout == "4321\n0\n"  # as under Docker, where no account says more
    with pytest.raises(AuthenticationException, match="nobody-here"):
        users.commands.run("true", user="nobody-here")


@pytest.mark.parametrize("name", [None, "app", "root"])
def test_files_commands_and_terminals_write_as_one_user(users, name):
    who = {"user": name} if name else {}
    users.files.write("shared/by-files", "1\n", **who)
    users.commands.run("cd ~; echo 2 >> shared/by-files; echo 1 > shared/by-command", **who)
    users.files.write("shared/by-command", "2\n", **who)
    terminal = users.pty.create(PtySize(rows=24, cols=80), timeout=60, cwd="~", **who)
    users.pty.send_stdin(terminal.pid, b"cd ~; echo 3 >> shared/by-files; echo 3 >> shared/by-command; exit\n")
    terminal.wait()
    assert users.files.read("shared/by-files", **who) == "1\n2\n3\n"
    assert users.files.read("shared/by-command", **who) == "2\n3\n"
    owners = {entry.owner for entry in users.files.list("shared", **who)}
    assert owners == {name or users.commands.run("id -un").stdout.strip()}


# --- A21, A23 ----------------------------------------------------------------------------------------------------------


def test_resizes_arrive_in_order_and_bad_ones_do_not(box):
    terminal = box.pty.create(PtySize(rows=24, cols=80), timeout=120)
    for index in range(1, 50):
        box.pty.resize(terminal.pid, PtySize(rows=index, cols=10 + index))
    box.pty.resize(terminal.pid, PtySize(rows=43, cols=132))
    for rows, cols in ((0, 0), (70000, 1), (1, 70000), (0, 80)):
        with pytest.raises(InvalidArgumentException, match="from 1 to 65535"):
            box.pty.resize(terminal.pid, PtySize(rows=rows, cols=cols))
    box.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    shown = bytearray()
    terminal.wait(on_pty=shown.extend)
    assert b"43 132" in shown


def test_a_terminal_outlives_its_viewer_and_has_two(box):
    terminal = box.pty.create(PtySize(rows=24, cols=80), timeout=0)
    box.pty.send_stdin(terminal.pid, b"tput smcup; tput cup 5 5; echo full-screen; read -n1 key; tput rmcup; echo back-$key-$((40+2))\n")
    next(iter(terminal))
    terminal.disconnect()
    time.sleep(1)
    viewers = [box.pty.connect(terminal.pid, timeout=120) for _ in range(2)]
    box.pty.send_stdin(terminal.pid, b"q")
    box.pty.send_stdin(terminal.pid, b"exit\n")
    for viewer in viewers:
        shown = bytearray()
        viewer.wait(on_pty=shown.extend)
        assert b"back-q-42" in shown


# --- A17, A19: these leave a sandbox in no state for others --------------------------------------------------------------

KILLS = [
    ("user", "kill -9 -1"),
    ("user", "pkill -9 -f ."),
    ("root", "kill -9 -1"),
    ("root", "pkill -9 -f ."),
    ("root", "pkill -9 -f python"),
    ("root", "for pid in $(ls /proc | grep '^[0-9]*$'); do kill -9 $pid 2>/dev/null; done; kill -9 1; kill -STOP 1; kill -SEGV 1"),
]


def test_nothing_a_command_kills_takes_the_agent_along(sandbox):
    for user, command in KILLS:
        # The command may well kill itself or the shell it runs in.
        with contextlib.suppress(CommandExitException):
            sandbox.commands.run(command, user=user, timeout=60)
        assert sandbox.is_running()
        assert sandbox.commands.run("echo ok").stdout == "ok\n", command
    marked = sandbox.commands.run("sleep 60 # secret-word", background=True)
    line = sandbox.commands.run("tr '\\0' ' ' < /proc/1/cmdline", user="root").stdout
    assert "secret-word" not in line
    assert "sleep" not in line
    marked.kill()
    # What root can break: SIGTERM to pid 1 is the orderly end of the machine, as `reboot` is.


HOGS = {
    "cpu": "for i in $(seq 24); do (setsid sh -c 'while :; do :; done' &); done; sleep 600",
    "forks": "ulimit -u 300; bomb() { bomb & bomb; }; bomb 2>/dev/null; sleep 600",
    "memory": "python3 -c 'import time; blocks = []\nwhile True: blocks.append(bytearray(b\"x\" * (8 << 20)))'",
}


@pytest.mark.parametrize("name", HOGS)
def test_the_agent_answers_while_a_command_takes_all(sandbox, name):
    hog = sandbox.commands.run(HOGS[name], background=True, timeout=0)
    end = time.monotonic() + 12
    while time.monotonic() < end:
        assert sandbox.is_running(request_timeout=30)
        assert sandbox.commands.run("echo ok", user="root", timeout=60, request_timeout=60).stdout == "ok\n"
    if name == "memory":
        # The hog goes, and nothing else.
        with pytest.raises(CommandExitException) as killed:
            hog.wait()
        assert killed.value.exit_code in (-1, 137)
        assert "Out of memory: Killed process" in sandbox.commands.run("dmesg", user="root").stdout
    else:
        assert hog.kill() is True
    before = time.monotonic()
    assert sandbox.commands.run("echo ok").stdout == "ok\n"
    assert time.monotonic() - before < PATIENCE_S
    assert sandbox.commands.run("cat /proc/1/oom_score_adj", user="root").stdout.strip() == "-1000"
