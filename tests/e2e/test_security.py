"""What docs/security.md says must not be possible, tried: by a guest, by a VMM that a guest has broken out of, by a user, by a client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crashes import vmms
from e2b import CommandExitException, NotFoundException, Sandbox
from guest_programs import wait_for

from agentenv.vmm.jail import GROUP

NOBODY = 65534
LIES = ("10.153.0.0", "10.117.0.3", "192.168.77.2", "169.254.1.1")
"""Addresses that a guest gives itself."""
CAPTURED_BYTES_MAX = 2 << 20
"""Of one VM: two files of its VMM's words, its sockets and states."""


@pytest.fixture
def other(node) -> Iterator[Any]:
    """A second tenant."""
    made = Sandbox.create("base", timeout=600, **node.options)
    yield made
    made.kill()


def answers(sandbox: Any, within_s: float = 30) -> float:
    """How long a small command takes."""
    begun = time.monotonic()
    assert sandbox.commands.run("echo here", timeout=within_s).stdout == "here\n"
    return time.monotonic() - begun


def vm_folder(node, sandbox: Any) -> Path:
    [folder] = (node.run / "vms").glob(f"{sandbox.sandbox_id}-*")
    return folder


def vmm_pid(node, sandbox: Any) -> int:
    return vmms(node)[sandbox.sandbox_id]


@dataclass(frozen=True)
class Jail:
    """Below a VMM's root folder: all that it finds, a file that it may make, those it may not change, and the state that a pause takes."""

    names: frozenset[str]
    its_own: str
    not_its_own: tuple[str, ...]
    state: str


QEMU_JAIL = Jail(
    frozenset({"out", "output", "qmp.sock", "vmm.log", "vmm.log.1"}), "/out/mine", ("/vmm.log", "/new", "/out/../../escaped"), "/out/state"
)
FIRECRACKER_JAIL = Jail(
    frozenset({"firecracker", "firecracker.pid", "api.sock", "dev", "run", "disk", "memory", "state", "capture", "state-out"}),
    "/mine",  # its root folder is a small file system in memory of its own
    ("/memory", "/state", "/capture"),
    "/state-out",
)


def jail_of(pid: int) -> Jail:
    return FIRECRACKER_JAIL if Path(f"/proc/{pid}/exe").readlink().name == "firecracker" else QEMU_JAIL


def status_of(pid: int) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)


def tree(top: Path) -> list[Path]:
    """Everything below `top` that this process can find."""
    found = []
    try:
        for entry in sorted(top.iterdir()):
            found += [entry, *(tree(entry) if entry.is_dir() and not entry.is_symlink() else [])]
    except PermissionError:
        pass
    return found


def as_user(user: int, action: Callable[[], Any], root: str | None = None, group: int | None = None) -> Any:
    """What `action` returns, or the OSError it ends with as text, when `user` runs it, below `root`; without `group` in its own."""
    group = user if group is None else group
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if root is not None:
                os.chroot(root)
                os.chdir("/")
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            try:
                said = json.dumps(action())
            except OSError as error:
                said = json.dumps(f"{type(error).__name__}")
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(pid, 0)
    return json.loads(text)


# --- a guest


def test_a_guest_that_lies_about_its_address_reaches_nobody(node, sandbox, other):
    """It is root in there, so it may give itself any address; what it sends still meets the rules of its namespace."""
    listener = socket.create_server(("0.0.0.0", 0))
    accepted: list[Any] = []
    threading.Thread(target=lambda: accepted.append(listener.accept()), daemon=True).start()
    other.commands.run("nohup python3 -m http.server 9000 --bind 0.0.0.0 > /dev/null 2>&1 &")
    script = f"""
import socket, subprocess, sys
lies = {LIES!r}
port = int(sys.argv[1])
reached = []
for own in lies:
    subprocess.run(["ip", "addr", "add", own + "/16", "dev", "eth0"], check=False)
    for host, number in [(a, p) for a in sys.argv[2:] for p in (port, 9000, 49983)]:
        with socket.socket() as one:
            one.settimeout(0.3)
            try:
                one.bind((own, 0))
                one.connect((host, number))
                reached.append([own, host, number])
            except OSError:
                pass
for family_host in ("ff02::1", "fe80::1"):
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.settimeout(0.5)
            one.connect((family_host, port, 0, 2))
            reached.append(family_host)
    except OSError:
        pass
print(reached)
"""
    links = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout.splitlines()
    # What it has, it reaches within itself: a slot may be at one of its lies, and a node in a sandbox of another, with the same address.
    itself = [*sandbox.commands.run("hostname -I").stdout.split(), *LIES]
    hosts = [host for line in links if not (host := line.split()[3].split("/")[0]).startswith("127.") and host not in itself][:4]
    sandbox.files.write("/tmp/lie.py", script)
    said = sandbox.commands.run(
        f"python3 /tmp/lie.py {listener.getsockname()[1]} {' '.join(hosts)} 169.254.169.254", user="root", timeout=240
    ).stdout
    listener.close()
    assert said == "[]\n"
    assert accepted == []


def test_a_guest_that_floods_its_console_fills_nothing(node, sandbox, other):
    sandbox.commands.run("for n in 1 2 3; do (timeout 8 cat /dev/zero > /dev/ttyS0 2>/dev/null &) ; done", user="root", timeout=60)
    sandbox.commands.run("(timeout 8 sh -c 'while :; do echo flood > /dev/kmsg; done' &) ; true", user="root", timeout=60)
    folder = vm_folder(node, sandbox)
    end = time.monotonic() + 12
    while time.monotonic() < end:
        used = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        assert used < CAPTURED_BYTES_MAX, f"{used} bytes in {folder}"
        answers(other)
        time.sleep(1)
    answers(sandbox, 120)


def test_a_fork_bomb_is_its_own_sandboxs_matter(node, sandbox, other):
    sandbox.commands.run("nohup bash -c 'b() { b | b & }; b' > /dev/null 2>&1 &", timeout=60)
    time.sleep(3)
    slowest = max(answers(other) for _ in range(5))
    assert slowest < 20, f"another sandbox took {slowest:.1f} s"
    assert Sandbox.kill(sandbox.sandbox_id, **node.options)
    answers(other)


def test_a_guest_cannot_write_more_than_its_disk(node, sandbox):
    before = os.statvfs(node.home).f_bavail
    end = "$(($(blockdev --getsize64 /dev/vda) / 512))"
    for command, word in (
        ("fallocate -l 1T /fill", "No space"),
        ("fallocate -l 100G /fill", "No space"),
        (f"dd if=/dev/zero of=/dev/vda oflag=direct bs=512 count=8 seek={end}", "No space"),
    ):
        with pytest.raises(CommandExitException) as refused:
            sandbox.commands.run(command, user="root", timeout=60)
        assert word in refused.value.stderr, refused.value.stderr
    written = (before - os.statvfs(node.home).f_bavail) * os.statvfs(node.home).f_frsize
    assert written < 1 << 30


# --- a VMM that its guest has broken out of


def test_a_vmm_is_nobody(node, sandbox, other):
    users = set()
    for one in (sandbox, other):
        pid = vmm_pid(node, one)
        status = status_of(pid)
        [user], [group] = set(status["Uid"].split()), set(status["Gid"].split())
        assert int(group) in (int(user), GROUP)
        assert status["Groups"].split() in ([], [group])
        users.add(int(user))
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert not Path(f"/proc/{pid}/root").samefile("/")
        assert Path(f"/proc/{pid}/ns/net").stat().st_ino != Path("/proc/self/ns/net").stat().st_ino
    assert len(users) == 2, "two sandboxes share a user"
    assert min(users) > NOBODY


@pytest.fixture
def used_node(node, debian) -> Iterator[None]:
    """The node with all the files and folders that one in use has: it makes some for its first secret, volume and image."""
    node.aenv("secret", "create", "e2e-security", input="word")
    node.aenv("volume", "create", "e2e-security")
    yield
    node.aenv("volume", "rm", "e2e-security")
    node.aenv("secret", "rm", "e2e-security")


@pytest.mark.usefixtures("used_node")
def test_a_broken_out_vmm_finds_nothing(node, sandbox, other):
    """As the VMM's user below the VMM's root folder: all that is left to a guest that has taken its VMM over."""
    pid, victim = vmm_pid(node, sandbox), vmm_pid(node, other)
    jail, status, root = jail_of(pid), status_of(pid), f"/proc/{pid}/root"
    user, group = int(status["Uid"].split()[0]), int(status["Gid"].split()[0])

    seen = as_user(user, lambda: [str(path) for path in tree(Path("/"))], root, group)
    assert {name.split("/")[1] for name in seen} <= jail.names, seen

    def write(name: str) -> Callable[[], int]:
        return lambda: Path(name).write_text("x")

    assert as_user(user, write(jail.its_own), root, group) == 1
    for name in jail.not_its_own:
        assert as_user(user, write(name), root, group) in ("PermissionError", "OSError"), name
    # Even outside its root folder it is a stranger to everybody.
    secrets = [
        node.home / "api-key",
        node.home / "node.db",
        node.home / "secret-key",
        node.run / "blockd.sock",
        Path(f"/proc/{victim}/mem"),
    ]
    for secret in secrets:
        assert as_user(user, lambda secret=secret: len(secret.read_bytes()), group=group) in ("PermissionError", "OSError"), secret
    assert as_user(user, lambda: os.kill(victim, signal.SIGTERM), group=group) == "PermissionError"
    for folder in ("layers", "snapshots", "builds", "log", "volumes", "cache/images"):
        assert as_user(user, lambda folder=folder: len(list((node.home / folder).iterdir())), group=group) == "PermissionError", folder
    Path(root + jail.its_own).unlink()


def test_a_vmm_cannot_have_us_read_or_overwrite_a_file(node, sandbox):
    """It writes the state that a pause takes; a link in its place must lead nowhere."""
    pid = vmm_pid(node, sandbox)
    out = Path(f"/proc/{pid}/root{jail_of(pid).state}")
    secret = (node.home / "api-key").read_bytes()
    out.symlink_to(node.home / "api-key")
    with pytest.raises(Exception, match="state could not be saved"):
        sandbox.pause()
    assert (node.home / "api-key").read_bytes() == secret
    out.unlink()
    answers(sandbox)
    sandbox.pause()
    sandbox.connect(timeout=600)


def test_a_vmm_that_crashes_takes_nobody_along(node, sandbox, other):
    os.kill(vmm_pid(node, sandbox), signal.SIGSEGV)
    wait_for(lambda: not list((node.run / "vms").glob(f"{sandbox.sandbox_id}-*")), "its folder is left")
    answers(other)
    listed = [one.sandbox_id for one in Sandbox.list(**node.options).next_items()]
    assert other.sandbox_id in listed
    assert sandbox.sandbox_id not in listed


# --- a user of the machine


@pytest.mark.usefixtures("used_node")
def test_other_users_of_the_machine_see_nothing(node, sandbox):
    def look() -> list[str]:
        return [str(path) for top in (node.home, node.run) for path in tree(top)]

    assert as_user(NOBODY, look) == [], "the folders can be listed"
    for name in ("api-key", "secret-key", "node.db"):
        assert as_user(NOBODY, lambda name=name: len((node.home / name).read_bytes())) == "PermissionError", name

    def call(path: Path) -> Callable[[], str]:
        def connect() -> str:
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(str(path))
            return "connected"

        return connect

    for path in (node.run / "api.sock", node.run / "blockd.sock", vm_folder(node, sandbox) / "qmp.sock"):
        assert as_user(NOBODY, call(path)) == "PermissionError", path


def test_secrets_are_in_no_log_and_no_command_line(node):
    word = f"hush-{uuid.uuid4().hex}"
    made = Sandbox.create("base", timeout=600, envs={"TOKEN": word}, **node.options)
    try:
        assert made.commands.run("printenv TOKEN", envs={"OTHER": word}).stdout == f"{word}\n"
        made.files.write("/tmp/secret", word)
        with pytest.raises(urllib.error.HTTPError):  # refused requests are logged
            urllib.request.urlopen(urllib.request.Request(node.url + "/sandboxes", headers={"X-API-KEY": word}), timeout=30)
        made.pause()
        made.connect(timeout=600)
        secrets = {"a variable": word, "the token": made._envd_access_token, "the key": node.variables["E2B_API_KEY"]}
        logs = "".join(path.read_text(errors="replace") for path in (node.home / "log").iterdir())
        logs += node.aenv("logs", "--format", "json", made.sandbox_id).stdout
        lines = []
        for entry in Path("/proc").glob("[0-9]*"):
            if int(entry.name) == os.getpid():
                continue
            try:
                lines.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
        for what, secret in secrets.items():
            assert secret
            assert secret not in logs, f"{what} is in a log"
            assert not [line for line in lines if secret in line], f"{what} is in a command line"
    finally:
        made.kill()


# --- a client


def raw(node, data: bytes, wait_s: float = 20) -> bytes:
    """The answer to bytes that no library would send."""
    with socket.create_connection(("127.0.0.1", node.port), timeout=wait_s) as one:
        try:
            one.sendall(data)
            return one.recv(4096)
        except ConnectionError:
            return b""


def test_a_client_cannot_exhaust_the_front_door(node, sandbox):
    key = node.variables["E2B_API_KEY"].encode()
    assert raw(node, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Filler: " + b"a" * (8 << 20) + b"\r\n\r\n").startswith((b"HTTP/1.1 431", b""))
    many = b"".join(b"X-%d: y\r\n" % n for n in range(20_000))
    assert raw(node, b"GET /health HTTP/1.1\r\nHost: x\r\n" + many + b"\r\n")[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
    huge = b"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: " + key + b"\r\nContent-Length: 1099511627776\r\n\r\n{"
    assert raw(node, huge).startswith(b"HTTP/1.1 413")
    slow = [socket.create_connection(("127.0.0.1", node.port), timeout=20) for _ in range(400)]
    try:
        for number, one in enumerate(slow):
            one.sendall(b"GET /sandboxes HTTP/1.1\r\nHost: x\r\nX-Slow: " if number % 2 else b"P")
        assert answers(sandbox) < 20
        with urllib.request.urlopen(node.url + "/health", timeout=20) as answer:
            assert answer.status == 200
    finally:
        for one in slow:
            one.close()


@pytest.mark.parametrize(
    "trick", ["../" * 8 + "etc/shadow", "/etc/shadow", "..%2f..%2f..%2f..%2fetc%2fshadow", "%2e%2e/%2e%2e/api-key", "a/../../../api-key"]
)
def test_names_in_requests_lead_to_no_file_of_the_host(node, trick):
    mark = Path("/etc/shadow").read_text().splitlines()[0]
    key = node.variables["E2B_API_KEY"]
    paths = [
        f"/templates/{trick}",
        f"/templates/x/files/{trick}",
        f"/volumes/{trick}",
        f"/volumecontent/x/file?path={trick}",
        f"/sandboxes/{trick}/logs",
        f"/images/{trick}",
        f"/{trick}",
    ]
    for path in paths:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-KEY: {key}\r\nConnection: close\r\n\r\n".encode()
        answer = raw(node, head)
        assert answer[:10] == b"HTTP/1.1 4", (path, answer)
        assert mark.encode() not in answer
        assert key.encode() not in answer


def test_the_files_api_of_a_sandbox_is_the_guests_own(node, sandbox):
    """Whatever path a client gives, it is the guest that opens it."""
    own = sandbox.commands.run("head -1 /etc/passwd; cat /etc/hostname").stdout.splitlines()
    assert sandbox.files.read("/../../../../etc/passwd", user="root").splitlines()[0] == own[0]
    assert sandbox.files.read("/proc/1/root/etc/hostname", user="root").strip() == own[1] != socket.gethostname()
    for path in (f"/proc/1/root{node.home}/api-key", f"/../..{node.home}/api-key"):
        with pytest.raises(NotFoundException):
            sandbox.files.read(path, user="root")
