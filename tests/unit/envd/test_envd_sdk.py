"""The official client against the real agent, without a control plane (contract section 1.1, debug mode)."""

import gzip
import io
import time

import pytest

e2b = pytest.importorskip("e2b")
from e2b.sandbox.filesystem.filesystem import WriteEntry  # noqa: E402


@pytest.fixture
def sandbox(envd, monkeypatch):
    monkeypatch.setenv("E2B_DEBUG", "true")
    monkeypatch.setenv("E2B_SANDBOX_URL", envd.url)
    return e2b.Sandbox.create()


def test_commands(sandbox):
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
    with pytest.raises(e2b.CommandExitException) as failure:
        sandbox.commands.run("echo no; exit 3")
    assert (failure.value.exit_code, failure.value.stdout) == (3, "no\n")
    assert sandbox.commands.run("whoami", user="root").stdout == "root\n"
    assert sandbox.commands.run("whoami; pwd").stdout == "user\n/home/user\n"
    assert sandbox.commands.run("echo $K; pwd", envs={"K": "v"}, cwd="/tmp").stdout == "v\n/tmp\n"
    assert sandbox.commands.run("cat <<EOF\na 'b' \"c\" $((1+1))\nEOF").stdout == "a 'b' \"c\" 2\n"
    assert sandbox.is_running()


def test_command_failures(sandbox):
    with pytest.raises(e2b.InvalidArgumentException):
        sandbox.commands.run("true", cwd="/no/such")
    with pytest.raises(e2b.AuthenticationException):
        sandbox.commands.run("true", user="nobody-here")
    before = time.monotonic()
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("sleep 30", timeout=1)
    assert time.monotonic() - before < 5
    # The client's own clock runs out at the same moment as the agent's.
    while any("sleep 30" in process.args for process in sandbox.commands.list()):
        assert time.monotonic() - before < 5


def test_background_list_connect_and_kill(sandbox):
    handle = sandbox.commands.run("for i in $(seq 1 200); do echo $i; sleep 0.05; done", background=True)
    assert handle.pid in [process.pid for process in sandbox.commands.list()]
    handle.disconnect()
    lines = []
    other = sandbox.commands.connect(handle.pid)
    for stdout, _, _ in other:
        lines += (stdout or "").split()
        if len(lines) > 5:
            break
    assert [int(line) for line in lines] == list(range(int(lines[0]), int(lines[-1]) + 1))
    assert sandbox.commands.kill(handle.pid) is True
    assert sandbox.commands.kill(handle.pid) is False
    with pytest.raises(e2b.CommandExitException):
        sandbox.commands.run(f"kill -0 {handle.pid}")
    assert handle.pid not in [process.pid for process in sandbox.commands.list()]


def test_stdin(sandbox):
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "Hello, ")
    sandbox.commands.send_stdin(handle.pid, "ü!\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "Hello, ü!\n"
    assert sandbox.commands.run("cat").stdout == ""


def test_large_outputs(sandbox):
    chunks = []
    result = sandbox.commands.run("seq 1 200000", on_stdout=chunks.append)
    assert result.stdout == "".join(chunks)
    assert result.stdout.endswith("\n200000\n")
    assert len(result.stdout) == 1288895


def test_terminal(sandbox):
    size = e2b.sandbox.commands.command_handle.PtySize
    handle = sandbox.pty.create(size(rows=24, cols=80), envs={"PS1": "$ "})
    sandbox.pty.resize(handle.pid, size(rows=43, cols=132))
    sandbox.pty.send_stdin(handle.pid, b"stty size; exit\n")
    shown = []
    handle.wait(on_pty=lambda data: shown.append(data))
    assert b"43 132" in b"".join(shown)
    again = sandbox.pty.create(size(rows=24, cols=80))
    assert sandbox.pty.kill(again.pid) is True


def test_files(sandbox):
    info = sandbox.files.write("dir/a.txt", "hello")
    assert (info.name, info.path) == ("a.txt", "/home/user/dir/a.txt")
    assert sandbox.files.read("dir/a.txt") == "hello"
    assert sandbox.files.read("dir/a.txt", format="bytes") == b"hello"
    assert b"".join(sandbox.files.read("dir/a.txt", format="stream")) == b"hello"
    assert sandbox.files.exists("dir/a.txt") is True
    assert sandbox.files.exists("dir/none") is False
    assert sandbox.files.make_dir("dir/sub") is True
    assert sandbox.files.make_dir("dir/sub") is False
    moved = sandbox.files.rename("dir/a.txt", "dir/b.txt")
    assert moved.path == "/home/user/dir/b.txt"
    listed = sandbox.files.list("dir")
    assert [(entry.name, entry.type) for entry in listed] == [("b.txt", e2b.FileType.FILE), ("sub", e2b.FileType.DIR)]
    about = sandbox.files.get_info("dir/b.txt")
    assert (about.size, about.mode, about.owner, about.permissions) == (5, 0o644, "user", "-rw-r--r--")
    sandbox.files.remove("dir")
    assert sandbox.files.exists("dir") is False
    with pytest.raises(e2b.FileNotFoundException):
        sandbox.files.read("dir/a.txt")
    with pytest.raises(e2b.NotFoundException):
        sandbox.files.list("dir")
    with pytest.raises(e2b.InvalidArgumentException):
        sandbox.files.read("/home")


def test_write_many_and_streams(sandbox):
    entries = [WriteEntry(path=f"many/f {index}", data=str(index)) for index in range(10)]
    entries.append(WriteEntry(path='many/q"uote', data=b"\0\xff"))
    assert [info.name for info in sandbox.files.write_files(entries)][-1] == 'q"uote'
    assert sandbox.files.read('many/q"uote', format="bytes") == b"\0\xff"
    assert len(sandbox.files.list("many")) == 11
    sandbox.files.write("stream", io.BytesIO(b"x" * 300_000))
    assert len(sandbox.files.read("stream", format="bytes")) == 300_000
    sandbox.files.write("empty", "")
    assert sandbox.files.read("empty") == ""


def test_gzip_and_metadata(sandbox):
    text = "compress me " * 10_000
    sandbox.files.write("packed", text, gzip=True)
    assert sandbox.files.read("packed", gzip=True) == text
    assert sandbox.files.read("packed") == text
    info = sandbox.files.write("tagged", "x", metadata={"owner-team": "a b"})
    assert info.metadata == {"owner-team": "a b"}
    assert sandbox.files.get_info("tagged").metadata == {"owner-team": "a b"}
    assert gzip.decompress(gzip.compress(b"x")) == b"x"


def test_links_and_procfs(sandbox):
    sandbox.commands.run("echo t > target; ln -sf target link")
    info = sandbox.files.get_info("link")
    assert info.symlink_target == "/home/user/target"
    assert len(sandbox.files.read("/proc/sys/kernel/random/boot_id").strip()) == 36


def test_large_file_stream(sandbox, envd):
    """100 MB each way; the agent's memory stays flat."""
    size_bytes = 100_000_000

    class Zeros(io.RawIOBase):
        left = size_bytes

        def readable(self):
            return True

        def readinto(self, buffer):
            count = min(len(buffer), self.left)
            buffer[:count] = bytes(count)
            self.left -= count
            return count

    sandbox.files.write("/tmp/envd-sdk-large", io.BufferedReader(Zeros()), request_timeout=120)
    try:
        total = sum(len(chunk) for chunk in sandbox.files.read("/tmp/envd-sdk-large", format="stream", request_timeout=120))
        assert total == size_bytes
        assert envd.rss_bytes() < 48 << 20
    finally:
        sandbox.files.remove("/tmp/envd-sdk-large", user="user")


async def test_async_client(envd, monkeypatch):
    monkeypatch.setenv("E2B_DEBUG", "true")
    monkeypatch.setenv("E2B_SANDBOX_URL", envd.url)
    sandbox = await e2b.AsyncSandbox.create()
    assert (await sandbox.commands.run("echo hi")).stdout == "hi\n"
    handle = await sandbox.commands.run("sleep 60", background=True)
    assert await handle.kill() is True
    await sandbox.files.write("async", "data")
    assert await sandbox.files.read("async") == "data"
    assert await sandbox.is_running()
