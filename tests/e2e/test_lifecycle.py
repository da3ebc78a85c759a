"""A sandbox's life through the official SDK: every step against a real guest."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

import pytest
from e2b import CommandExitException, NotFoundException, Sandbox, SandboxState, TimeoutException
from guest_programs import count, start_counter, wait_beyond, wait_for


def fetch(node, sandbox, port: int, path: str = "/") -> bytes:
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
    with urllib.request.urlopen(urllib.request.Request(node.url + path, headers=headers), timeout=30) as reply:
        return reply.read()


def test_commands(sandbox):
    assert sandbox.commands.run("echo out; echo err >&2").stdout == "out\n"
    assert sandbox.commands.run("id -un; pwd; echo $HOME").stdout == "user\n/home/user\n/home/user\n"
    assert sandbox.commands.run("sudo id -un").stdout == "root\n"
    assert sandbox.commands.run("python -c 'print(6*7)'").stdout == "42\n"
    assert sandbox.commands.run("echo $A", envs={"A": "b c"}).stdout == "b c\n"
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo why >&2; exit 3")
    assert (failed.value.exit_code, failed.value.stderr) == (3, "why\n")
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 30", timeout=1)


def test_tools_of_the_base_template(sandbox):
    found = sandbox.commands.run("for p in bash python3 python git curl sudo ps tput ss; do command -v $p || echo missing $p; done").stdout
    assert "missing" not in found
    assert sandbox.commands.run("curl --version | head -c 4; git --version | head -c 3").stdout == "curlgit"
    assert sandbox.commands.run("test -s /etc/ssl/certs/ca-certificates.crt && hostname").stdout.strip() == sandbox.sandbox_id


def test_background_and_stdin(sandbox):
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "typed\n")
    seen = []
    for out, _err, _pty in handle:
        seen.append(out)
        break
    assert seen == ["typed\n"]
    assert handle.pid in [process.pid for process in sandbox.commands.list()]
    assert handle.kill() is True
    assert handle.pid not in [process.pid for process in sandbox.commands.list()]


def test_pty(sandbox):
    from e2b import PtySize

    output = bytearray()
    terminal = sandbox.pty.create(PtySize(rows=33, cols=101), timeout=60)
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    terminal.wait(on_pty=output.extend)
    assert b"33 101" in output


def test_files(sandbox):
    sandbox.files.write("/home/user/a/b.txt", "héllo")
    assert sandbox.files.read("a/b.txt") == "héllo"
    big = bytes(range(256)) * 40_000
    sandbox.files.write("/tmp/big.bin", big)
    assert bytes(sandbox.files.read("/tmp/big.bin", format="bytes")) == big
    assert [entry.name for entry in sandbox.files.list("/home/user/a")] == ["b.txt"]
    sandbox.files.rename("/home/user/a/b.txt", "/home/user/c.txt")
    assert sandbox.files.exists("/home/user/c.txt")
    assert not sandbox.files.exists("/home/user/a/b.txt")
    assert sandbox.files.make_dir("/home/user/d") is True
    assert sandbox.files.make_dir("/home/user/d") is False
    sandbox.files.remove("/home/user/c.txt")
    with pytest.raises(NotFoundException):
        sandbox.files.read("/home/user/c.txt")
    assert sandbox.commands.run("stat -c %U /tmp/big.bin").stdout == "user\n"


def test_web_server_through_the_proxy(node, sandbox):
    with pytest.raises(urllib.error.HTTPError) as closed:
        fetch(node, sandbox, 8000)
    assert closed.value.code == 502
    assert b"port is not open" in closed.value.read()
    sandbox.commands.run("mkdir -p w; echo page > w/p; cd w; exec python3 -m http.server 8000", background=True, timeout=0)
    wait_for(lambda: b"8000" in sandbox.commands.run("ss -Hltn").stdout.encode(), "the web server does not come up")
    assert fetch(node, sandbox, 8000, "/p") == b"page\n"


def test_pause_resume_keeps_the_process(node, sandbox):
    counter = start_counter(sandbox)
    boot_id = sandbox.files.read("/proc/sys/kernel/random/boot_id")
    before = count(sandbox)
    sandbox.pause()
    assert sandbox.is_running() is False
    assert sandbox.get_info().state == SandboxState.PAUSED
    sandbox.connect(timeout=600)
    assert sandbox.is_running() is True
    assert sandbox.files.read("/proc/sys/kernel/random/boot_id") == boot_id
    assert counter.pid in [process.pid for process in sandbox.commands.list()]
    wait_beyond(sandbox, before)
    asked_at = time.time()
    told = float(sandbox.commands.run("date +%s.%N").stdout)
    drift_s = max(asked_at - told, told - time.time())
    assert drift_s < 2, f"the guest's clock is {drift_s:.1f} s off after a resume"


def test_fork_diverges_and_has_its_own_identity(node, sandbox):
    sandbox.commands.run("echo before > f; head -c 8 /dev/urandom > /dev/null")
    children = sandbox.fork(count=3, timeout=600)
    try:
        assert not [child for child in children if isinstance(child, Exception)]
        for number, child in enumerate(children):
            child.files.write("mine", str(number))
        assert [child.files.read("mine") for child in children] == ["0", "1", "2"]
        assert {child.files.read("f") for child in children} == {"before\n"}
        assert not sandbox.files.exists("mine")
        everyone = [sandbox, *children]
        assert len({one.sandbox_id for one in everyone}) == 4
        assert len({one._envd_access_token for one in everyone}) == 4
        assert len({one.commands.run("hostname; cat /etc/machine-id").stdout for one in everyone}) == 4
        assert len({one.commands.run("head -c 16 /dev/urandom | od -An -tx1").stdout for one in everyone}) == 4
    finally:
        for child in children:
            if not isinstance(child, Exception):
                child.kill()


def test_fork_of_a_paused_sandbox(node, sandbox):
    sandbox.files.write("f", "kept")
    sandbox.pause()
    (child,) = sandbox.fork(count=1, timeout=600)
    try:
        assert child.files.read("f") == "kept"
        assert sandbox.get_info().state == SandboxState.PAUSED
    finally:
        child.kill()


def test_kill_while_a_command_runs(node):
    victim = Sandbox.create("base", timeout=600, **node.options)
    handle = victim.commands.run("sleep 300", background=True, timeout=0)
    Sandbox.kill(victim.sandbox_id, **node.options)
    with pytest.raises(TimeoutException, match="sandbox was killed or reached its end of life"):
        handle.wait()
    assert victim.is_running() is False
    assert victim.kill() is False


def test_timeouts(node):
    short = Sandbox.create("base", timeout=600, **node.options)
    short.set_timeout(1)
    wait_for(lambda: not short.is_running(), "a sandbox outlived its timeout")
    sleeper = Sandbox.create("base", timeout=600, lifecycle={"on_timeout": "pause"}, **node.options)
    try:
        sleeper.files.write("f", "kept")
        sleeper.set_timeout(0)
        assert sleeper.get_info().state == SandboxState.PAUSED
        sleeper.connect(timeout=600)
        assert sleeper.files.read("f") == "kept"
        before = sleeper.get_info().end_at
        sleeper.connect(timeout=5)
        assert sleeper.get_info().end_at == before
    finally:
        sleeper.kill()


def test_a_guest_that_powers_off_is_reported(node):
    victim = Sandbox.create("base", timeout=600, **node.options)
    victim.commands.run("sudo sh -c 'echo o > /proc/sysrq-trigger'", background=True)
    wait_for(lambda: not victim.is_running(), "nobody noticed that the guest is gone")
    log = node.aenv("logs", victim.sandbox_id, "--json").stdout
    assert "ended by itself" in log


def test_list_and_metadata(node):
    marked = Sandbox.create("base", timeout=600, metadata={"run": "a b&c=d"}, **node.options)
    try:
        from e2b import SandboxQuery

        pages = Sandbox.list(query=SandboxQuery(metadata={"run": "a b&c=d"}), **node.options)
        assert [item.sandbox_id for item in pages.next_items()] == [marked.sandbox_id]
        pages = Sandbox.list(query=SandboxQuery(metadata={"run": "other"}), **node.options)
        assert pages.next_items() == []
    finally:
        marked.kill()
