"""One remote command with its streams joined to ours, over the SDK's own handle with a scripted event stream."""

import os
import signal
import sys
import termios
import threading
import time
from types import SimpleNamespace

import e2b.exceptions as sdk
import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb
from e2b.sandbox_sync.commands.command_handle import CommandHandle
from protobuf import Oneof

from agentenv.cli import stream, terminal
from agentenv.cli.exits import CliError
from agentenv.cli.remote_command import RemoteCommand
from agentenv.cli.shell import EscapeKeys
from agentenv.cli.stream import exit_code

NOT_TEXT = bytes(range(256)) * 3 + "grüße\n".encode()


def data(name, chunk):
    return process_pb.StartResponse(
        event=process_pb.ProcessEvent(event=Oneof("data", process_pb.ProcessEvent.DataEvent(output=Oneof(name, chunk))))
    )


def end(code, error=None):
    fields = {"exit_code": code, "exited": code >= 0, "status": "x"} | ({"error": error} if error else {})
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=Oneof("end", process_pb.ProcessEvent.EndEvent(**fields))))


class FakeSandbox:
    """Its one command replays `events`; an exception among them is raised, a function is called first."""

    sandbox_id = "i" + "0" * 20

    def __init__(self, *events):
        self.events = events
        self.asked = {}
        self.killed = threading.Event()
        self.stdin = []
        self.stdin_closed = threading.Event()
        self.commands = SimpleNamespace(run=self.run)

    def run(self, line, **options):
        self.asked = {"line": line, **options}
        return CommandHandle(
            pid=7,
            handle_kill=lambda: self.killed.set() or True,
            events=self.replay(),
            handle_send_stdin=lambda chunk, _timeout=None: self.stdin.append(chunk),
            handle_close_stdin=lambda _timeout=None: self.stdin_closed.set(),
            retain_output=options["retain_output"],
        )

    def replay(self):
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            if callable(event):
                event()
            else:
                yield event


def run(sandbox, timeout_s=0, with_stdin=False):
    return RemoteCommand(sandbox, "line", "root", "/tmp", {"A": "1"}, timeout_s, with_stdin).run()


def test_bytes_pass_unchanged_and_streams_stay_apart(capfdbinary):
    halves = [NOT_TEXT[:301], NOT_TEXT[301:777], NOT_TEXT[777:]]
    sandbox = FakeSandbox(*(data("stdout", half) for half in halves), data("stderr", b"\xff\xfeoops"), end(0))
    assert run(sandbox) == 0
    shown = capfdbinary.readouterr()
    assert shown.out == NOT_TEXT
    assert shown.err == b"\xff\xfeoops"


def test_options_reach_the_sdk():
    sandbox = FakeSandbox(end(0))
    run(sandbox, timeout_s=2.5)
    wanted = {
        "line": "line",
        "user": "root",
        "cwd": "/tmp",
        "envs": {"A": "1"},
        "timeout": 2.5,
        "stdin": False,
        "background": True,
        "retain_output": False,
    }
    assert sandbox.asked == wanted


@pytest.mark.parametrize(
    ("code", "error", "wanted"),
    [
        (0, None, 0),
        (3, "exit status 3", 3),
        (255, None, 255),
        (-1, "signal: killed", 137),
        (-1, "signal: terminated", 143),
        (-1, "signal: hangup", 129),
        (-1, "odd", 1),
    ],
)
def test_exit_codes(code, error, wanted):
    assert exit_code(code, error) == wanted
    assert run(FakeSandbox(end(code, error))) == wanted


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_kill_the_command(number, code):
    sandbox = FakeSandbox(lambda: sandbox.killed.wait(10), end(-1, "signal: killed"))
    before = signal.getsignal(number)
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    assert run(sandbox) == code
    assert sandbox.killed.is_set()
    assert signal.getsignal(number) is before


def test_closed_output_kills_the_command(monkeypatch):
    def broken(_fd, _data):
        raise BrokenPipeError

    monkeypatch.setattr(stream.os, "write", broken)
    sandbox = FakeSandbox(data("stdout", b"y\n"), lambda: sandbox.killed.wait(10), end(-1, "signal: killed"))
    assert run(sandbox) == 141
    assert sandbox.killed.is_set()


def test_partial_writes_lose_nothing(monkeypatch, capfdbinary):
    write = os.write
    monkeypatch.setattr(stream.os, "write", lambda fd, left: write(fd, left[:7]))
    assert run(FakeSandbox(data("stdout", NOT_TEXT), end(0))) == 0
    assert capfdbinary.readouterr().out == NOT_TEXT


def test_own_timeout_is_124():
    with pytest.raises(CliError) as caught:
        run(FakeSandbox(sdk.TimeoutException("deadline")), timeout_s=1)
    assert caught.value.code == 124
    assert "within 1 s" in caught.value.message


def cut_connection():
    """As the SDK's transport tells it."""
    error = ConnectError(Code.UNAVAILABLE, "stream cut")
    error.__cause__ = ConnectionResetError("reset")
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (sdk.SandboxNotRunningException("x was not found: The sandbox was killed"), 3),
        (sdk.SandboxUnreachableException("port is not open"), 4),
        (sdk.TimeoutException("too slow: This error is likely due to"), 4),
        (sdk.InvalidArgumentException("cwd '/x' does not exist"), 2),
        (sdk.AuthenticationException("invalid username: 'x'"), 1),
        (sdk.SandboxException("internal: boom"), 1),
        (ConnectionResetError("reset"), 4),
        (cut_connection(), 4),
    ],
)
def test_errors_of_the_sdk_have_cause_and_code(error, code):
    with pytest.raises(CliError) as caught:
        run(FakeSandbox(error))
    assert caught.value.code == code
    assert "likely due to" not in caught.value.message


def test_a_stream_that_ends_without_an_end_event_is_an_error():
    with pytest.raises(CliError, match="lost the connection") as caught:
        run(FakeSandbox(data("stdout", b"half")))
    assert caught.value.code == 4


def test_stdin_is_passed_on_and_closed(monkeypatch):
    reader, writer = os.pipe()
    os.write(writer, b"\x00binary\xff")
    os.close(writer)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        sandbox = FakeSandbox(lambda: sandbox.stdin_closed.wait(10), end(0))
        assert run(sandbox, with_stdin=True) == 0
    assert b"".join(sandbox.stdin) == b"\x00binary\xff"
    assert sandbox.stdin_closed.is_set()


@pytest.mark.parametrize(
    ("keys", "passed", "left"),
    [
        ([b"ls\r"], b"ls\r", False),
        ([b"~."], b"", True),
        ([b"a~."], b"a~.", False),
        ([b"ls\r~."], b"ls\r", True),
        ([b"\r", b"~", b"."], b"\r", True),
        ([b"~~."], b"~.", False),
        ([b"~/x\r"], b"~/x\r", False),
        ([b"\n~", b"a~."], b"\n~a~.", False),
    ],
)
def test_escape_keys(keys, passed, left):
    escape = EscapeKeys()
    results = [escape.feed(key) for key in keys]
    assert b"".join(out for out, _ in results) == passed
    assert results[-1][1] is left


def test_raw_mode_is_undone_whatever_happens(monkeypatch):
    leader, follower = os.openpty()
    with os.fdopen(follower, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(stdin.fileno())
        local_flags = []

        def fail_in_raw_mode():
            with terminal.raw():
                local_flags.append(termios.tcgetattr(stdin.fileno())[3])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_in_raw_mode()
        assert not local_flags[0] & (termios.ECHO | termios.ICANON | termios.ISIG)
        assert termios.tcgetattr(stdin.fileno()) == before
    os.close(leader)


def test_a_terminal_without_size_counts_as_24_by_80(monkeypatch):
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert terminal.terminal_size() == (24, 80)
        termios.tcsetwinsize(stdout.fileno(), (50, 132))
        assert terminal.terminal_size() == (50, 132)
    os.close(leader)


def test_waiting_costs_little():
    begun_cpu_s = time.process_time()
    run(FakeSandbox(lambda: time.sleep(1), end(0)))
    assert time.process_time() - begun_cpu_s < 0.3
