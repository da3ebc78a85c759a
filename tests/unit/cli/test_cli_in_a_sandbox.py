"""`aenv exec` and `aenv shell` against the real guest agent, run here as an ordinary process instead of in a VM."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aenv_runner import Screen, free_port, process_environment, wait_for

from agentenv.host import native

BUILDS = Path(__file__).parents[3] / "native" / "target"
PLACES = (
    native.FOLDER / "envd",
    *(BUILDS / target / kind / "envd" for target in ("x86_64-unknown-linux-gnu", "") for kind in ("release", "debug")),
)
ENVD = next((path for path in PLACES if path.is_file()), None)
pytestmark = [
    pytest.mark.skipif(ENVD is None, reason="needs envd, which `make setup` builds"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as envd changes users"),
]


@pytest.fixture
def guest(server, aenv):
    """(sandbox id, environment): a sandbox of the fake node whose guest agent is real."""
    port = free_port()
    process = subprocess.Popen([ENVD, "--no-init", "--port", str(port), "--bind", "127.0.0.1", "--default-user", "root"])
    try:
        wait_for(lambda: answers(port), 10)
        yield aenv.start(), {**server.environment, "E2B_SANDBOX_URL": f"http://127.0.0.1:{port}"}
    finally:
        process.kill()
        process.wait(10)


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run(guest, *words, options=(), stdin=b"", **settings):
    sandbox_id, environment = guest
    argv = [sys.executable, "-m", "agentenv.cli", "exec", *options, sandbox_id, "--", *words]
    return subprocess.run(argv, env=process_environment(environment), input=stdin, capture_output=True, timeout=60, check=False, **settings)


def test_streams_code_and_words(guest):
    done = run(guest, "sh", "-c", 'echo "out $1"; echo err >&2; exit 7', "x", "a  b;c")
    assert (done.stdout, done.stderr, done.returncode) == (b"out a  b;c\n", b"err\n", 7)


def test_one_word_is_a_shell_line(guest):
    assert run(guest, "printf 'a\\nb\\n' | wc -l").stdout.strip() == b"2"


def test_options_before_the_id(guest):
    done = run(guest, "echo $HOME $PWD $A; id -un", options=("--user", "root", "--cwd", "/tmp", "--env", "A=1 2"))
    assert done.stdout.decode().splitlines() == ["/root /tmp 1 2", "root"]


def call(guest, *arguments, **settings):
    argv = [sys.executable, "-m", "agentenv.cli", *arguments]
    return subprocess.run(argv, env=process_environment(guest[1]), capture_output=True, timeout=60, check=False, **settings)


@pytest.mark.parametrize(
    ("before", "behind", "shown"),
    [
        ((), ("printf", "%s,", "-u", "--help", "--", "-e"), b"-u,--help,--,-e,"),
        ((), ("--", "printf", "%s,", "--", "x"), b"--,x,"),
        (("-c", "/tmp", "-e", "A=1"), ("sh", "-c", "echo $PWD $A"), b"/tmp 1\n"),
        ((), ("-c", "/tmp", "--env", "A=1", "--", "sh", "-c", "echo $PWD $A"), b"/tmp 1\n"),
        ((), ("echo $((6*7))",), b"42\n"),
    ],
)
@pytest.mark.parametrize("name", [("exec",), ("sandbox", "exec"), ("sbx", "ex")])
def test_all_behind_the_id_is_the_command(guest, name, before, behind, shown):
    done = call(guest, *name, "-n", *before, guest[0], *behind)
    assert (done.stdout, done.returncode) == (shown, 0), done.stderr


@pytest.mark.parametrize("behind", [("--",), ("-u", "root"), ("--nonsense", "--", "true")])
def test_exec_without_a_command(guest, behind):
    done = call(guest, "exec", guest[0], *behind)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"hint: `aenv exec --help`" in done.stderr


def test_left_running_in_the_background(guest, tmp_path):
    file = tmp_path / "in"
    done = call(guest, "exec", "-b", guest[0], f"cat > {file}; echo end >> {file}; exec sleep 600", input=b"piped\n")
    assert (done.returncode, done.stderr) == (0, b"")
    pid = int(done.stdout)
    wait_for(lambda: file.exists() and file.read_text() == "piped\nend\n")
    wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
    os.kill(pid, signal.SIGKILL)
    refused = call(guest, "exec", "-b", "--timeout", "5", guest[0], "true")
    assert refused.returncode == 2


def test_stdin_is_passed_on_to_its_end(guest):
    payload = os.urandom(300_000)
    done = run(guest, "cat", stdin=payload)
    assert done.returncode == 0, done.stderr
    assert done.stdout == payload


def test_no_stdin_leaves_the_input_to_others(guest):
    assert run(guest, "cat; echo end", options=("-n",), stdin=b"unread").stdout == b"end\n"


def test_death_by_signal(guest):
    assert run(guest, "kill -9 $$").returncode == 137
    assert run(guest, "kill -TERM $$").returncode == 143


def test_timeout_kills_and_is_124(guest, tmp_path):
    pid_file = tmp_path / "pid"
    done = run(guest, f"echo $$ > {pid_file}; sleep 600", options=("--timeout", "3"))
    assert done.returncode == 124
    assert b"did not end within 3 s" in done.stderr
    wait_for(lambda: not Path(f"/proc/{pid_file.read_text().strip()}").exists(), 5)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_kills_the_command(guest, tmp_path, number, code):
    sandbox_id, environment = guest
    pid_file = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-m", "agentenv.cli", "exec", "-n", sandbox_id, "--", f"echo $$ > {pid_file}; sleep 60"],
        env=process_environment(environment),
        stderr=subprocess.PIPE,
    )
    pid = wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code, errors
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 5)


def test_closed_pipe_ends_an_endless_command(guest):
    sandbox_id, environment = guest
    line = f"{sys.executable} -m agentenv.cli exec -n {sandbox_id} -- yes | head -1"
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"], env=process_environment(environment), capture_output=True, timeout=60
    )
    assert done.stdout == b"y\n"
    assert done.returncode == 141, done.stderr


def test_wrong_user_and_folder(guest):
    wrong_user = run(guest, "true", options=("--user", "nobody-like-that"))
    assert wrong_user.returncode == 1
    assert b"invalid username" in wrong_user.stderr
    wrong_folder = run(guest, "true", options=("--cwd", "/not/there"))
    assert wrong_folder.returncode == 2
    assert b"/not/there" in wrong_folder.stderr


def test_paused_sandbox_is_not_woken(guest, aenv, server):
    aenv("pause", guest[0])
    done = run(guest, "true")
    assert done.returncode == 1
    assert f"aenv resume {guest[0]}".encode() in done.stderr
    assert server.orchestrator.peek(guest[0]).state == "paused"


def test_exec_does_not_change_the_end_of_life(guest, server):
    before = server.orchestrator.peek(guest[0]).end_at_ms
    assert run(guest, "true").returncode == 0
    assert server.orchestrator.peek(guest[0]).end_at_ms == before


def test_large_output_is_whole(guest):
    done = run(guest, "head -c 20000000 /dev/zero | tr '\\0' x")
    assert (done.returncode, done.stderr, len(done.stdout)) == (0, b"", 20_000_000)
    assert done.stdout.count(b"x") == 20_000_000


@pytest.fixture
def screen(guest):
    screens = []

    def make(*arguments, **size):
        screens.append(Screen(guest[1], *arguments, **size))
        return screens[-1]

    yield make
    for one in screens:
        one.close()


def test_shell_runs_resizes_and_ends_with_its_code(guest, screen):
    shell = screen("shell", guest[0], rows=30, columns=100)
    shell.type("stty size\r")
    shell.wait_for(r"30 100")
    shell.resize(40, 132)
    shell.type("until stty size | grep '40 132'; do sleep 0.1; done\r")
    shell.wait_for(r"\r40 132")
    shell.type("exit 5\r")
    assert shell.end() == (5, True)


def test_keys_reach_the_guest_uninterpreted(guest, screen):
    shell = screen("shell", guest[0])
    shell.wait_for("# $")
    shell.type("sh -c 'echo begin; exec sleep 1000'\r")  # a process of its own, that has the terminal once it speaks
    shell.wait_for(r"\rbegin")
    shell.type("\x03")
    shell.type("echo code=$?\r")
    shell.wait_for(r"\rcode=130(?s:.*)# $")
    shell.type("\x04")
    assert shell.end()[1] is True


def test_escape_keys_leave_the_shell(guest, screen):
    shell = screen("shell", guest[0])
    shell.wait_for("# $")
    shell.type("echo begin; sleep 1000\r")
    shell.wait_for(r"\rbegin")
    shell.type("\r~.")
    assert shell.end() == (0, True)
    assert "left the shell" in shell.shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminal_is_restored_after_a_signal(guest, screen, number):
    shell = screen("shell", guest[0])
    shell.type("echo read''y\r")
    shell.wait_for("ready")
    shell.process.send_signal(number)
    assert shell.end() == (128 + number, True)


def test_what_is_typed_while_the_shell_opens_is_not_lost(guest, screen):
    shell = screen("shell", guest[0])
    shell.type("echo $((7*6))\r")
    shell.wait_for(r"\r42")
    shell.type("exit\r")
    assert shell.end() == (0, True)


def test_start_with_shell(screen):
    shell = screen("start", "--shell")
    shell.wait_for(r"sandbox i[a-z0-9]{20}")
    shell.wait_for("# $")
    shell.type("echo $((6*7))\r")
    shell.wait_for(r"\r42")
    shell.type("exit\r")
    assert shell.end() == (0, True)


@pytest.mark.parametrize(
    ("arguments", "words", "state", "life_s"),
    [
        ((), "is killed", "killed", 0),
        (("--lifecycle.ontimeout", "pause"), "is paused", "paused", 0),
        (("--timeout", "900"), "is killed in 900 s", "running", 900),
    ],
)
def test_create_lives_as_long_as_its_terminal(screen, server, arguments, words, state, life_s):
    shell = screen("create", "-e", "A=1", "-c", "/tmp", "-u", "root", *arguments)
    sandbox_id = shell.wait_for(r"sandbox (i[a-z0-9]{20})")[1]
    shell.wait_for("# $")
    shell.type("pwd; exit 3\r")
    shell.wait_for(r"\r/tmp")
    assert shell.end() == (3, True)
    assert f"sandbox {sandbox_id} {words}" in shell.shown
    server.orchestrator._expire_due()
    sandbox = server.orchestrator.peek(sandbox_id)
    assert (sandbox.state, sandbox.env_vars) == (state, {"A": "1"})
    if life_s:
        assert abs(sandbox.end_at_ms - server.orchestrator.clock.now_ms() - 1000 * life_s) < 60_000


def test_connect_goes_by_every_name(guest, screen):
    for words in (("connect",), ("sandbox", "connect"), ("sbx", "cn")):
        shell = screen(*words, "-u", "root", "-e", "A=7", guest[0])
        shell.wait_for("# $")
        shell.type("exit $A\r")
        assert shell.end() == (7, True)


def test_an_open_shell_keeps_the_sandbox_alive(guest, server, monkeypatch):
    from agentenv.cli import shell
    from agentenv.cli.api import Api
    from agentenv.cli.target import find_target

    sandbox_id, environment = guest
    server.orchestrator._change(sandbox_id, end_at_ms=server.orchestrator.clock.now_ms() + 20_000)
    with Api(find_target(environment)) as api:
        session = shell._Session(api, type("Sandbox", (), {"sandbox_id": sandbox_id}), None)
        session._refresh()
    assert server.orchestrator.peek(sandbox_id).end_at_ms > server.orchestrator.clock.now_ms() + 50_000


def test_shell_without_terminal(guest):
    sandbox_id, environment = guest
    done = subprocess.run(
        [sys.executable, "-m", "agentenv.cli", "shell", sandbox_id], env=process_environment(environment), input=b"", capture_output=True
    )
    assert done.returncode == 2
    assert b"aenv exec" in done.stderr
