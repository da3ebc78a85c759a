"""Terminals."""

import base64
import time

import pytest

SIZE = {"size": {"cols": 80, "rows": 24}}


def open_shell(envd, **more):
    stream = envd.start("/bin/bash", "--norc", "-i", pty=more.pop("pty", SIZE), envs={"PS1": "$ ", "TERM": "dumb"}, **more)
    return stream, stream.pid()


def send(envd, pid, text):
    given = {"pty": base64.b64encode(text.encode()).decode()}
    status, answer = envd.call("process.Process/SendInput", {"process": {"pid": pid}, "input": given})
    assert status == 200, answer


def read_until(stream, words):
    text = b""
    deadline = time.monotonic() + 10
    while words.encode() not in text:
        assert time.monotonic() < deadline, text
        event = stream.next()
        assert event is not None, text
        text += base64.b64decode(event.get("data", {}).get("pty", ""))
    return text.decode()


def resize(envd, pid, cols, rows):
    return envd.call("process.Process/Update", {"process": {"pid": pid}, "pty": {"size": {"cols": cols, "rows": rows}}})


def test_a_terminal_is_one_and_ends(envd):
    stream, pid = open_shell(envd)
    send(envd, pid, "tty; stty size; test -t 0 && echo is-$((40+2)); echo > /dev/tty; ps -o tpgid= -p $$ >/dev/null; exit 6\n")
    result = stream.result()
    text = result.pty.decode()
    assert "/dev/pts/" in text
    assert "24 80" in text
    assert "is-42" in text
    assert "no job control" not in text
    assert result.code == 6


def test_resizes_arrive_in_order_and_bad_ones_do_not(envd):
    """Case A21."""
    stream, pid = open_shell(envd)
    for index in range(1, 100):
        assert resize(envd, pid, 10 + index, index) == (200, {})
    assert resize(envd, pid, 132, 43) == (200, {})
    for cols, rows in ((0, 0), (1, 70000), (70000, 1), (0, 24)):
        status, answer = resize(envd, pid, cols, rows)
        assert (status, answer["code"]) == (400, "invalid_argument")
        assert "from 1 to 65535" in answer["message"]
    send(envd, pid, "stty size\n")
    read_until(stream, "43 132")
    send(envd, pid, "trap 'echo win-$((1+1))' WINCH; echo set-$((3+4))\n")
    read_until(stream, "set-7")
    resize(envd, pid, 100, 40)
    send(envd, pid, "\n")
    read_until(stream, "win-2")
    send(envd, pid, "exit\n")
    stream.result()


@pytest.mark.parametrize("pty", [{}, {"size": {}}, {"size": {"cols": 0, "rows": 0}}])
def test_a_terminal_without_a_size_has_the_usual_one(envd, pty):
    assert envd.start("/bin/stty", "size", pty=pty).result().pty.split() == [b"24", b"80"]


def test_control_keys_reach_the_foreground(envd):
    stream, pid = open_shell(envd)
    send(envd, pid, "sleep 100; echo code-$?\n")
    time.sleep(0.5)
    send(envd, pid, "\x03")
    send(envd, pid, "echo code-$((100+30))\n")
    read_until(stream, "code-130\r\n$ ")  # with its prompt: a ^D before the shell reads is not an end to it
    send(envd, pid, "\x04")
    stream.result()


def test_a_viewer_may_leave_and_come_back_and_two_may_watch(envd):
    """Case A23."""
    stream, pid = open_shell(envd)
    stream.close()
    time.sleep(0.2)
    viewers = [envd.open("process.Process/Connect", {"process": {"pid": pid}}) for _ in range(2)]
    for viewer in viewers:
        assert viewer.pid() == pid
    send(envd, pid, "echo both-$((50+5))\n")
    for viewer in viewers:
        read_until(viewer, "both-55")
    send(envd, pid, "exit\n")
    assert [viewer.result().code for viewer in viewers] == [0, 0]


def test_stdin_and_close_are_refused_on_a_terminal(envd):
    stream, pid = open_shell(envd)
    status, answer = envd.call("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": "eA=="}})
    assert (status, answer["code"]) == (500, "internal")
    assert envd.call("process.Process/CloseStdin", {"process": {"pid": pid}})[0] == 500
    assert envd.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 9}) == (200, {})
    assert stream.result().end["status"] == "signal: killed"


def test_a_background_child_on_the_terminal_does_not_hold_the_end(envd):
    before = time.monotonic()
    result = envd.start("/bin/bash", "-c", "trap '' HUP; (sleep 5 &) ; echo bye", pty=SIZE).result()
    assert time.monotonic() - before < 3
    assert b"bye" in result.pty


def test_many_terminals(envd):
    """Case L01."""
    streams = [envd.start("/bin/cat", pty=SIZE) for _ in range(100)]
    pids = [stream.pid() for stream in streams]
    send(envd, pids[57], "here\n")
    read_until(streams[57], "here")
    for pid in pids:
        assert envd.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 15}) == (200, {})
    assert all(stream.result().end["status"] == "signal: terminated" for stream in streams)
