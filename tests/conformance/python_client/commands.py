"""Scenarios about commands and terminals."""

from __future__ import annotations

import asyncio
import threading

import e2b
from sdk import VERSION, eventually, need, raises, takes, value


async def command_result(sdk):
    async with sdk.sandbox() as sandbox:
        done = await sdk.run(sandbox, "echo out; echo 'fëhler' >&2")
        assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "fëhler\n", 0)
        failed = await raises(e2b.CommandExitException, lambda: sandbox.commands.run("echo some; echo why >&2; exit 7"))
        assert (failed.exit_code, failed.stdout, failed.stderr) == (7, "some\n", "why\n")
        assert (await sdk.run(sandbox, "pwd", cwd="/tmp")).stdout == "/tmp\n"
        assert (await sdk.run(sandbox, "whoami; id -u", user="root")).stdout == "root\n0\n"
        assert (await sdk.run(sandbox, "whoami; pwd; echo $HOME")).stdout == "user\n/home/user\n/home/user\n"
        assert (await sdk.run(sandbox, 'printf %s "$A|$B"', envs={"A": "1 2", "B": "ü"})).stdout == "1 2|ü"
        await raises(e2b.SandboxException, lambda: sandbox.commands.run("true", cwd="/no/such/folder"))
        seen = []
        done = await sdk.run(sandbox, "echo one; echo two >&2", on_stdout=seen.append, on_stderr=seen.append)
        assert sorted("".join(seen).split()) == ["one", "two"]
        assert done.stdout == "one\n"


async def background_command(sdk):
    async with sdk.sandbox() as sandbox:
        handle = await sdk.run(sandbox, "echo started; sleep 0.3; echo later; exit 3", background=True)
        assert handle.pid > 0
        seen = []
        error = await raises(e2b.CommandExitException, lambda: sdk.follow(handle, seen.append))
        assert (error.exit_code, error.stdout) == (3, "started\nlater\n")
        sleeper = await sdk.run(sandbox, "exec sleep 300", background=True, timeout=0)
        listed = {process.pid: process for process in await value(sandbox.commands.list())}
        assert "sleep 300" in " ".join(listed[sleeper.pid].args)
        assert await value(sandbox.commands.kill(sleeper.pid)) is True
        await raises(e2b.CommandExitException, sleeper.wait)
        assert sleeper.pid not in [process.pid for process in await value(sandbox.commands.list())]
        assert await value(sandbox.commands.kill(sleeper.pid)) is False
        other = await sdk.run(sandbox, "echo bye; exec sleep 300", background=True, timeout=0)
        if sdk.asynchronous:
            await eventually(lambda: other.stdout == "bye\n", "the output so far")
        assert await value(other.kill()) is True
        ended = await raises(e2b.CommandExitException, other.wait)
        if sdk.asynchronous:
            assert (other.exit_code, other.stdout, other.stderr) == (ended.exit_code, "bye\n", "")
            assert "killed" in other.error
        assert await value(other.kill()) is False


async def standard_input(sdk):
    async with sdk.sandbox() as sandbox:
        run = sandbox.commands.run
        options = {"stdin": True} if VERSION >= (2, 0) else {}
        reader = await value(run("read a; read b; echo got $a $b", background=True, **options))
        await value(sandbox.commands.send_stdin(reader.pid, "first\nsec"))
        await value(sandbox.commands.send_stdin(reader.pid, "ond\n"))
        assert (await value(reader.wait())).stdout == "got first second\n"
        if options:
            assert (await sdk.run(sandbox, "cat; echo end")).stdout == "end\n"
        if not hasattr(sandbox.commands, "close_stdin"):
            return
        counter = await value(run("wc -c", background=True, **options))
        await value(sandbox.commands.send_stdin(counter.pid, "six by"))
        await value(sandbox.commands.close_stdin(counter.pid))
        assert (await value(counter.wait())).stdout.strip() == "6"
        by_handle = await value(run("cat", background=True, **options))
        await value(by_handle.send_stdin(b"bytes\n"))
        await value(by_handle.close_stdin())
        assert (await value(by_handle.wait())).stdout == "bytes\n"
        if not hasattr(sandbox.commands, "stream_input"):
            return
        streamed = await value(run("wc -l", background=True, **options))
        lines = [f"line {number}\n" for number in range(500)]
        await _stream_input(sdk, sandbox.commands, streamed.pid, lines)
        await value(sandbox.commands.close_stdin(streamed.pid))
        assert (await value(streamed.wait())).stdout.strip() == "500"


async def _stream_input(sdk, owner, pid, parts):
    if not sdk.asynchronous:
        owner.stream_input(pid, iter(parts))
        return
    stream = await value(owner.stream_input(pid))
    for part in parts:
        await stream.send(part)
    await stream.close()


async def reattach(sdk):
    async with sdk.sandbox() as sandbox:
        script = "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.3; done; exit 4"
        first = await sdk.run(sandbox, script, background=True, timeout=0)
        await value(first.disconnect())
        other = await sdk.connect(sandbox.sandbox_id)
        seen = []
        options = {"on_stdout": seen.append} if sdk.asynchronous else {}
        again = await value(other.commands.connect(first.pid, **options))
        assert again.pid == first.pid
        error = await raises(e2b.CommandExitException, lambda: sdk.follow(again, seen.append))
        assert error.exit_code == 4
        assert "".join(seen).endswith("9\n10\n")
        await raises(e2b.SandboxException, lambda: sandbox.commands.connect(999_999))


async def command_timeout(sdk):
    async with sdk.sandbox() as sandbox:
        # Older releases may see their own reading end first, and then say so in the words of their HTTP library.
        await raises(e2b.TimeoutException if VERSION >= (2, 45) else Exception, lambda: sandbox.commands.run("sleep 20", timeout=1))
        assert (await sdk.run(sandbox, "echo still here")).stdout == "still here\n"

        async def ended():
            return "sleep 20" not in str([process.args for process in await value(sandbox.commands.list())])

        await eventually(ended, "the command is gone after its time")


async def big_output(sdk):
    async with sdk.sandbox() as sandbox:
        done = await sdk.run(sandbox, "head -c 2000000 /dev/zero | tr '\\0' x; printf ä")
        assert len(done.stdout) == 2_000_001
        assert done.stdout.endswith("xä")
        quiet = sandbox.commands.run
        if not takes(quiet, "retain_output"):
            return
        seen = []
        done = await value(quiet("echo not kept", on_stdout=seen.append, retain_output=False))
        assert (done.stdout, "".join(seen)) == (None, "not kept\n")


async def environment(sdk):
    async with sdk.sandbox(envs={"COLOUR": "blue", "EMPTY": ""}) as sandbox:
        assert (await sdk.run(sandbox, 'printf %s "$COLOUR$EMPTY"')).stdout == "blue"
        assert (await sdk.run(sandbox, 'printf %s "$COLOUR"', envs={"COLOUR": "red"})).stdout == "red"
        assert (await sdk.run(sandbox, 'printf %s "$COLOUR"')).stdout == "blue"
        told = (await sdk.run(sandbox, 'printf %s "$E2B_SANDBOX $E2B_SANDBOX_ID"')).stdout
        assert told == f"true {sandbox.sandbox_id.split('-')[0]}"


class _Screen:
    """What a terminal has shown."""

    def __init__(self):
        self._data = bytearray()

    def __call__(self, data):
        self._data += data

    @property
    def text(self):
        return bytes(self._data).decode(errors="replace")


async def terminal(sdk):
    async with sdk.sandbox() as sandbox:
        screen = _Screen()
        handle = await sdk.terminal(sandbox, screen, envs={"MARK": "here"}, cwd="/tmp")
        await value(sandbox.pty.send_stdin(handle.pid, b'echo "$MARK in $(pwd) $(stty size)"\n'))
        await value(sandbox.pty.resize(handle.pid, e2b.PtySize(43, 132)))
        await value(sandbox.pty.send_stdin(handle.pid, b"echo now $(stty size)\n"))
        if hasattr(sandbox.pty, "stream_input"):
            await _stream_input(sdk, sandbox.pty, handle.pid, [b"echo stre", b"amed\n"])
        await value(sandbox.pty.send_stdin(handle.pid, b"exit\n"))
        done = await sdk.terminal_end(handle, screen)
        assert done.exit_code == 0
        assert "here in /tmp " in screen.text, screen.text
        assert "now 43 132" in screen.text, screen.text
        if hasattr(sandbox.pty, "stream_input"):
            assert screen.text.count("streamed") >= 2, screen.text  # the echo and the answer
        killed = await sdk.terminal(sandbox, screen, timeout=0)
        assert await value(sandbox.pty.kill(killed.pid)) is True
        await raises(e2b.CommandExitException, lambda: sdk.terminal_end(killed, screen))
        assert await value(sandbox.pty.kill(killed.pid)) is False


async def terminal_reattach(sdk):
    async with sdk.sandbox() as sandbox:
        need(sandbox.pty, "connect")
        first, second = _Screen(), _Screen()
        handle = await sdk.terminal(sandbox, first, timeout=0)
        await value(sandbox.pty.send_stdin(handle.pid, b"kept=yes\n"))
        await value(handle.disconnect())
        again = await sdk.terminal(sandbox, second, pid=handle.pid, timeout=0)
        await value(sandbox.pty.send_stdin(handle.pid, b'echo "kept: $kept"; exit\n'))
        await sdk.terminal_end(again, second)
        assert "kept: yes" in second.text, second.text


async def kill_during_command(sdk):
    sandbox = await sdk.create()
    other = await sdk.connect(sandbox.sandbox_id)
    command = "echo up; sleep 120"  # its output shows that the stream stands: only then does its end tell of the kill

    if sdk.asynchronous:
        up = asyncio.Event()
        waiting = asyncio.ensure_future(sandbox.commands.run(command, timeout=0, on_stdout=lambda _: up.set()))
        await asyncio.wait_for(up.wait(), 60)
        assert await other.kill() is not False
        error = await raises(Exception, lambda: waiting)
    else:
        up = threading.Event()
        killer = threading.Thread(target=lambda: up.wait(60) and other.kill())
        killer.start()
        error = await raises(Exception, lambda: sandbox.commands.run(command, timeout=0, on_stdout=lambda _: up.set()))
        killer.join(60)
    if VERSION >= (2, 45):
        assert isinstance(error, e2b.TimeoutException), repr(error)
        assert "sandbox was killed or reached its end of life" in str(error)
    assert await value(sandbox.is_running()) is False


SCENARIOS = (
    command_result,
    background_command,
    standard_input,
    reattach,
    command_timeout,
    big_output,
    environment,
    terminal,
    terminal_reattach,
    kill_during_command,
)
