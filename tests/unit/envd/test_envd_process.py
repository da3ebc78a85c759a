"""process.Process: events, environment, identity, ends."""

import base64
import concurrent.futures
import http.client
import os
import re
import socket
import time
from pathlib import Path

import pytest
from envd_rig import frame


def text_of(events, name):
    return b"".join(base64.b64decode(event["data"].get(name, "")) for event in events if "data" in event)


def test_events_come_in_order_and_carry_the_exit(envd):
    stream = envd.shell("echo out; echo err >&2; exit 3")
    assert stream.reply.headers["Content-Type"] == "application/connect+json"
    result = stream.result()
    assert result.kinds[0] == "start"
    assert result.kinds[-1] == "end"
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    assert result.end == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert result.error is None


def test_success_and_signal_have_the_words_of_the_contract(envd):
    assert envd.run("true").end == {"exitCode": 0, "exited": True, "status": "exit status 0"}
    assert envd.run("kill -9 $$").end == {"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}
    assert envd.run("kill -15 $$").end["status"] == "signal: terminated"


def test_start_is_sent_before_any_output(envd):
    before = time.monotonic()
    stream = envd.shell("sleep 1; echo late")
    assert stream.pid() > 1
    assert time.monotonic() - before < 0.7
    assert stream.result().stdout == b"late\n"


def test_nothing_of_a_fast_ending_output_is_lost(envd):
    """Case A01: the exit must not overtake the last bytes of the pipes."""

    def one(_):
        return envd.run("seq 1 20000; echo END >&2")

    with concurrent.futures.ThreadPoolExecutor(20) as lanes:
        for result in lanes.map(one, range(200)):
            assert len(result.stdout) == 108894
            assert result.stdout.endswith(b"\n20000\n")
            assert result.stderr == b"END\n"
            assert result.kinds[-1] == "end"


def test_stdin_is_empty_unless_asked_for(envd):
    """Case A07."""
    before = time.monotonic()
    assert envd.run("cat").code == 0
    assert envd.run("grep foo").code == 1
    assert envd.run("read x; echo got:$x").stdout == b"got:\n"
    assert time.monotonic() - before < 3


def test_stdin_pipe_echoes_until_closed(envd):
    stream = envd.start("/bin/cat", stdin=True)
    pid = stream.pid()
    selector = {"process": {"pid": pid}}
    for text in (b"one\n", b"two\n"):
        status, _ = envd.call("process.Process/SendInput", {**selector, "input": {"stdin": base64.b64encode(text).decode()}})
        assert status == 200
        assert text_of([stream.next()], "stdout") == text
    assert envd.call("process.Process/CloseStdin", selector) == (200, {})
    assert stream.result().code == 0


def test_absent_stdin_field_means_a_pipe(envd):
    stream = envd.open("process.Process/Start", {"process": {"cmd": "/bin/cat"}})
    pid = stream.pid()
    status, _ = envd.call("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": "aGkK"}})
    assert status == 200
    assert text_of([stream.next()], "stdout") == b"hi\n"
    envd.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 15})
    assert stream.result().end["status"] == "signal: terminated"


def test_input_of_the_wrong_kind_is_refused(envd):
    stream = envd.shell("sleep 5")
    pid = stream.pid()
    for given in ({"stdin": "eA=="}, {"pty": "eA=="}):
        status, answer = envd.call("process.Process/SendInput", {"process": {"pid": pid}, "input": given})
        assert (status, answer["code"]) == (500, "internal")
    status, answer = envd.call("process.Process/Update", {"process": {"pid": pid}, "pty": {"size": {"cols": 9, "rows": 9}}})
    assert (status, answer["code"]) == (400, "failed_precondition")
    envd.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    stream.result()


def test_input_to_a_process_that_never_reads_ends_with_it(envd):
    stream = envd.start("/bin/sleep", "1", stdin=True)
    pid = stream.pid()
    big = base64.b64encode(b"x" * (1 << 20)).decode()
    before = time.monotonic()
    status, answer = envd.call("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": big}})
    assert status >= 400, answer
    assert 0.5 < time.monotonic() - before < 3
    stream.result()


def test_large_input_through_a_pipe_arrives_whole(envd):
    stream = envd.start("/usr/bin/wc", "-c", stdin=True)
    pid = stream.pid()
    piece = base64.b64encode(b"x" * 700_001).decode()
    for _ in range(3):
        assert envd.call("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": piece}})[0] == 200
    envd.call("process.Process/CloseStdin", {"process": {"pid": pid}})
    assert stream.result().stdout.strip() == b"2100003"


def test_stream_input(envd):
    stream = envd.start("/usr/bin/wc", "-c", stdin=True)
    pid = stream.pid()
    given = {"input": {"stdin": base64.b64encode(b"12345").decode()}}
    messages = [{"start": {"process": {"pid": pid}}}, {"keepalive": {}}, {"data": given}]
    body = b"".join(frame(message) for message in messages)
    status, headers, answer = envd.request("POST", "/process.Process/StreamInput", body, {"Content-Type": "application/connect+json"})
    assert (status, headers["content-type"]) == (200, "application/connect+json")
    assert answer == b"\0\0\0\0\x02{}\x02\0\0\0\x02{}"
    envd.call("process.Process/CloseStdin", {"process": {"pid": pid}})
    assert stream.result().stdout.strip() == b"5"


def test_identity_environment_and_folder(envd):
    """Case A15: one identity, by whatever way in."""
    question = "id -u; id -g; id -G; echo $HOME $USER $LOGNAME; pwd; env | sort | cut -d= -f1 | tr '\\n' ' '"
    own = "HOME LOGNAME PATH PWD SHLVL USER _ \n".replace("\n", "")
    expected = {
        None: ["4711", "4711", "4711 4712", "/home/user user user", "/home/user"],
        "app": ["12345", "100", "100 4712 4713", "/srv/app app app", "/srv/app"],
        "root": ["0", "0", "0", "/root root root", "/root"],
        "31337": ["31337", "0", "0", "/ 31337 31337", "/"],
    }
    for user, lines in expected.items():
        result = envd.run(question, user=user)
        assert result.stderr == b""
        assert result.stdout.decode().splitlines() == [*lines, own]
        size = {"size": {"cols": 200, "rows": 24}}
        terminal = envd.shell(question, user=user, pty=size).result()
        assert terminal.pty.decode().split("\r\n")[:5] == lines


def test_unknown_user(envd):
    assert envd.shell("true", user="nobody-here").error() == {"code": "unauthenticated", "message": "invalid username: 'nobody-here'"}
    status, answer = envd.call("filesystem.Filesystem/Stat", {"path": "/"}, user="nobody-here")
    assert (status, answer) == (401, {"code": "unauthenticated", "message": "invalid username: 'nobody-here'"})


def test_environment_layers(fresh):
    fresh.init(envVars={"A": "sandbox", "B": "sandbox", "PATH": "/opt/bin:/usr/bin:/bin"})
    result = fresh.run("echo $A $B $C $PATH", envs={"B": "request", "C": "x=y"})
    assert result.stdout == b"sandbox request x=y /opt/bin:/usr/bin:/bin\n"
    fresh.init(envVars={"Z": "1"})
    assert fresh.run("echo -$A-$Z").stdout == b"--1\n"


def test_children_have_none_of_the_agents_privileges_or_descriptors(envd):
    result = envd.run("cat /proc/self/oom_score_adj; nice; ls /proc/self/fd | wc -l; grep -E 'SigBlk|SigIgn' /proc/self/status")
    adjust, nice, count, *signals = result.stdout.decode().split("\n")
    assert (adjust, nice, count) == ("0", "0", "4")
    assert [line.split()[1] for line in signals if line] == ["0" * 16] * 2


def test_folder_rules(fresh, tmp_path):
    missing = fresh.shell("pwd", cwd="/no/such").error()
    assert missing == {"code": "invalid_argument", "message": "cwd '/no/such' does not exist"}
    assert fresh.run("pwd", cwd="/usr/../tmp").stdout == b"/tmp\n"
    fresh.init(defaultWorkdir="/var/tmp")
    assert fresh.run("pwd").stdout == b"/var/tmp\n"
    assert fresh.run("pwd", cwd="~").stdout == b"/home/user\n"
    fresh.init(defaultWorkdir="")
    assert fresh.run("pwd").stdout == b"/home/user\n"
    hidden = fresh.shell("pwd", cwd="/root", user="app").error()
    assert hidden["code"] in ("permission_denied", "invalid_argument")


def test_exec_failures_come_back_as_errors(envd):
    """Case L01, and no half-started process stays behind."""
    before = envd.pids()
    cases = [
        (("/bin/nope",), "not_found", "no such file"),
        (("nope-nope",), "not_found", "not found in PATH"),
        (("/etc/passwd",), "permission_denied", "permission denied"),
        (("/bin/echo", "x" * 200_000), "invalid_argument", "argument list too long"),
        (("/bin/echo", "a\0b"), "invalid_argument", "NUL"),
        (("",), "invalid_argument", "no program"),
    ]
    for command, code, words in cases:
        error = envd.start(*command).error()
        assert error["code"] == code, error
        assert words in error["message"]
    error = envd.shell("true", envs={"A": "x" * 3_000_000}).error()
    assert (error["code"], "too long" in error["message"]) == ("invalid_argument", True)
    assert envd.shell("true", envs={"A=B": "x"}).error()["code"] == "invalid_argument"
    assert envd.pids() == before


def test_program_names_are_looked_up_in_the_path_of_the_process(envd):
    program = envd.path("/home/user/only-here")
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    assert envd.start("only-here", envs={"PATH": "/home/user:/bin"}).result().stdout == b"found\n"
    assert envd.start("only-here").error()["code"] == "not_found"


def test_list_shows_what_runs_and_only_that(envd):
    stream = envd.shell("sleep 60", tag="my-tag", envs={"K": "v"}, cwd="/tmp")
    pid = stream.pid()
    listed = [process for process in envd.call("process.Process/List")[1]["processes"] if process["pid"] == pid]
    config = {"cmd": "/bin/bash", "args": ["-c", "sleep 60"], "envs": {"K": "v"}, "cwd": "/tmp"}
    assert listed == [{"config": config, "pid": pid, "tag": "my-tag"}]
    assert envd.call("process.Process/SendSignal", {"process": {"tag": "my-tag"}, "signal": "SIGNAL_SIGKILL"}) == (200, {})
    envd.wait_gone(pid, 2)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    status, answer = envd.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    assert (status, answer) == (404, {"code": "not_found", "message": f"process with pid {pid} not found"})
    assert stream.result().end["status"] == "signal: killed"


def test_a_background_child_does_not_hold_the_end(envd):
    before = time.monotonic()
    result = envd.run("(sleep 3; echo late) & echo $!")
    assert time.monotonic() - before < 2
    assert result.code == 0
    child = int(result.stdout)
    # It lives on, and may write without being killed for it.
    os.kill(child, 0)


def test_a_busy_background_child_does_not_hold_the_end(envd):
    before = time.monotonic()
    result = envd.run("yes & echo $! >&2")
    child = int(result.stderr)
    os.kill(child, 9)
    assert time.monotonic() - before < 6
    assert result.code == 0


def test_late_connect_gets_start_and_end(envd):
    stream = envd.shell("exit 7")
    pid = stream.pid()
    stream.result()
    late = envd.open("process.Process/Connect", {"process": {"pid": pid}}).result()
    assert late.kinds == ["start", "end"]
    assert late.code == 7
    assert envd.open("process.Process/Connect", {"process": {"pid": 4_000_000}}).error()["code"] == "not_found"
    assert envd.open("process.Process/Connect", {"process": {}}).error()["code"] == "invalid_argument"


def test_client_that_leaves_does_not_end_the_process(envd):
    """Case A05 in short: no replay, no repeat, and several followers."""
    stream = envd.shell("for i in $(seq 1 40); do echo $i; sleep 0.05; done")
    pid = stream.pid()
    stream.next()
    stream.close()
    time.sleep(0.3)
    assert pid in envd.pids()
    followers = [envd.open("process.Process/Connect", {"process": {"pid": pid}}) for _ in range(2)]
    for follower in followers:
        assert follower.pid() == pid
    results = [follower.result() for follower in followers]
    for result in results:
        numbers = [int(line) for line in result.stdout.split()]
        assert numbers == list(range(numbers[0], 41))
        assert numbers[0] > 2
        assert result.code == 0


def test_keepalives_on_silence(envd):
    result = envd.shell("sleep 2.6; echo done", headers={"Keepalive-Ping-Interval": "1"}).result()
    assert result.kinds.count("keepalive") == 2
    assert result.stdout == b"done\n"


def test_malformed_requests_are_named(envd):
    status, _, _ = envd.request("POST", "/process.Process/List", "{}", {"Content-Type": "text/plain"})
    assert status == 415
    status, answer = envd.call("process.Process/Nope")
    assert (status, answer["code"]) == (501, "unimplemented")
    status, _, body = envd.request("POST", "/process.Process/List", "{", {"Content-Type": "application/json; charset=utf-8"})
    assert status == 400
    assert b"invalid_argument" in body
    assert envd.open("process.Process/Start", b"[1").error()["code"] == "invalid_argument"
    status, answer = envd.call("process.Process/SendSignal", {"process": {"pid": 1}})
    assert (status, answer["code"]) == (400, "invalid_argument")
    status, _, _ = envd.request("GET", "/process.Process/List")
    assert status == 405


def test_the_agents_own_command_line_shows_nothing_of_users(envd):
    """Case A19."""
    stream = envd.shell("sleep 5 # secret-word")
    pid = stream.pid()
    assert b"secret-word" not in Path(f"/proc/{envd.child.pid}/cmdline").read_bytes()
    envd.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 9})
    stream.result()


@pytest.mark.parametrize("method", ["Start", "Connect"])
@pytest.mark.parametrize("late_s", [0, 0.001, 0.05, 0.3])
def test_output_is_whole_however_late_the_end_of_the_request_is(envd, method, late_s):
    """The message comes first, the last chunk of the body later: the answer must not be cut by a reset (case A01)."""
    size = 3_000_000
    produce = f"read x; head -c {size} /dev/zero | tr '\\0' x"
    pid = 0
    if method == "Connect":
        started = envd.start("/bin/bash", "-c", produce, stdin=True)
        pid = started.pid()
        started.close()  # a reader that reads nothing would hold the program back
        message = {"process": {"pid": pid}}
    else:
        message = {"process": {"cmd": "/bin/bash", "args": ["-c", produce.removeprefix("read x; ")]}}
    body = frame(message)
    head = (
        f"POST /process.Process/{method} HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\n"
        "Connect-Protocol-Version: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", envd.port), timeout=60) as client:
        client.sendall(head.encode() + b"%x\r\n%s\r\n" % (len(body), body))
        time.sleep(late_s)
        client.sendall(b"0\r\n\r\n")
        if pid:
            envd.call("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": base64.b64encode(b"\n").decode()}})
        reply = http.client.HTTPResponse(client)
        reply.begin()
        received = bytearray()
        while part := reply.read(1 << 14):
            received += part
            time.sleep(0.0005)  # a reader that leaves much in flight
    text = b"".join(base64.b64decode(chunk) for chunk in re.findall(rb'"stdout":"([^"]*)"', received))
    assert len(text) == size
