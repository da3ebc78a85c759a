"""Volumes in real guests: shared, kept, confined, and there again after everything that can happen to a sandbox."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import CommandExitException, Sandbox, Volume
from e2b.exceptions import SandboxException, VolumePathNotFoundException

from agentenv.host import process

PLACE = "/mnt/shared data"  # with a blank, as names may have
APPEND = f"import time\nf = open('{PLACE}/log', 'a')\nfor n in range(100000):\n    print(n, file=f, flush=True)\n    time.sleep(0.1)\n"
Start = Callable[..., Sandbox]


@pytest.fixture
def api(node, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("E2B_VOLUME_API_URL", node.url)
    return {name: node.options[name] for name in ("api_key", "api_url")}


@pytest.fixture
def volume(api: dict[str, Any]) -> Iterator[Volume]:
    made = Volume.create(f"v-{uuid.uuid4().hex}", **api)
    yield made
    Volume.destroy(made.volume_id, **api)


@pytest.fixture
def start(node, volume: Volume) -> Iterator[Start]:
    """Starts sandboxes that mount the volume; kills them in the end."""
    started: list[Sandbox] = []

    def begin(mounts: dict[str, Any] | None = None) -> Sandbox:
        mounts = {PLACE: volume} if mounts is None else mounts
        started.append(Sandbox.create("base", timeout=600, volume_mounts=mounts, **node.options))
        return started[-1]

    yield begin
    for sandbox in started:
        sandbox.kill()


def run(sandbox: Sandbox, command: str, **more: Any) -> str:
    return sandbox.commands.run(command, timeout=120, **more).stdout


def eventually(condition: Callable[[], bool], deadline_s: float = 90) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.3)


def servers(node) -> dict[str, process.ProcessId]:
    return {folder.name: found for folder, found in process.working_below(node.run / "volumes").items()}


def test_two_sandboxes_and_the_api_share_files_that_outlive_them(node, api, volume: Volume, start: Start):
    one, two = start(), start()
    assert one.get_info().volume_mounts == [{"name": volume.name, "path": PLACE}]
    run(one, f"echo from one > '{PLACE}/a' && mkdir '{PLACE}/d' && ln -s ../a '{PLACE}/d/link'")
    assert run(two, f"cat '{PLACE}/d/link'") == "from one\n"
    run(two, f"echo and two >> '{PLACE}/a'")
    eventually(lambda: run(one, f"cat '{PLACE}/a'") == "from one\nand two\n")
    assert volume.read_file("/a") == "from one\nand two\n"
    assert (volume.get_info("/a").uid, volume.get_info("/a").mode) == (1000, 0o644)
    volume.write_file("/from-api", "x" * 300_000)
    eventually(lambda: run(one, f"wc -c < '{PLACE}/from-api' || true").strip() == "300000")
    run(two, f"echo appended by the default user >> '{PLACE}/from-api'")
    one.files.write(f"{PLACE}/by-files", "through the agent")
    assert two.files.read(f"{PLACE}/by-files") == "through the agent"
    one.kill()
    two.kill()
    eventually(lambda: not servers(node), 30)
    assert run(start(), f"cat '{PLACE}/a'") == "from one\nand two\n"


def test_a_program_goes_on_over_pause_fork_and_restarts(node, volume: Volume, start: Start):
    sandbox = start()
    sandbox.files.write("/tmp/append.py", APPEND)
    sandbox.commands.run("python3 /tmp/append.py", background=True, timeout=0)

    def lines() -> int:
        return len(volume.read_file("/log").splitlines())

    def goes_on() -> None:
        # What the program has written but the guest's kernel has not sent yet comes with a sync.
        before = lines()
        eventually(lambda: bool(run(sandbox, "sync -f '" + PLACE + "/log'")) or lines() > before + 3)

    eventually(lambda: volume.exists("/log"))
    goes_on()
    sandbox.pause()
    eventually(lambda: not servers(node), 60)
    sandbox.connect(timeout=600)
    goes_on()

    (served,) = servers(node).values()
    os.kill(served.pid, signal.SIGKILL)
    goes_on()  # programs have only waited

    node.kill_server()
    node.up()
    goes_on()
    (again,) = servers(node).values()
    assert again != served

    (child,) = sandbox.fork(count=1, timeout=600)
    try:
        run(child, f"echo hello > '{PLACE}/of-child'")
        assert volume.read_file("/of-child") == "hello\n"
        assert len(servers(node)) == 2
        goes_on()
    finally:
        child.kill()
    numbers = volume.read_file("/log").splitlines()
    assert numbers[:5] == ["0", "1", "2", "3", "4"]


def test_a_guest_reaches_its_own_volumes_only(api, volume: Volume, start: Start, sandbox: Sandbox):
    other = Volume.create(f"o-{uuid.uuid4().hex}", **api)
    try:
        guest = start()
        options = "vers=3,nolock,proto=tcp,mountproto=tcp,addr=169.254.0.22,mountaddr=169.254.0.22,port=2049,mountport=2049"
        mount = "mkdir -p /x && mount -i -t nfs -o {} 169.254.0.22:/{} /x"
        run(guest, mount.format(options, volume.volume_id) + " && umount /x", user="root")  # this is how it works
        for target in (other.volume_id, "", "../" + other.volume_id, volume.volume_id + "/.."):
            with pytest.raises(CommandExitException):
                run(guest, mount.format(options, target), user="root")
        with pytest.raises(CommandExitException):  # nothing listens where there are no volumes
            run(sandbox, "timeout 10 bash -c '</dev/tcp/169.254.0.22/2049'")
        run(guest, f"ln -s /etc/passwd '{PLACE}/passwd'; ln -s ../../.. '{PLACE}/up'")
        with pytest.raises(VolumePathNotFoundException):
            volume.read_file("/passwd")
        with pytest.raises(VolumePathNotFoundException):
            volume.read_file("/up/node.db")
        assert run(guest, f"stat -c '%U %a' '{PLACE}'").split() == ["user", "777"]
        with pytest.raises(CommandExitException):
            run(guest, f"mknod '{PLACE}/null' c 1 3", user="root")
    finally:
        Volume.destroy(other.volume_id, **api)


def test_a_deleted_volume_is_gone_for_its_sandboxes_and_harms_nothing_else(api, volume: Volume, start: Start):
    guest = start()
    run(guest, f"echo x > '{PLACE}/a'")
    assert Volume.destroy(volume.volume_id, **api)
    with pytest.raises(CommandExitException):
        run(guest, f"sleep 2; ls '{PLACE}' && cat '{PLACE}/a'")
    assert run(guest, "echo alive") == "alive\n"
    guest.pause()
    guest.connect(timeout=600)
    assert run(guest, f"ls -A '{PLACE}' && echo alive") == "alive\n"  # unmounted: nothing waits for a server that is gone


def test_a_path_that_cannot_be_mounted_on_is_refused_and_leaves_nothing(node, volume: Volume, start: Start):
    before = {one.sandbox_id for one in Sandbox.list(**node.options).next_items()}
    with pytest.raises(SandboxException, match="cannot mount a volume on '/etc/passwd/x'"):
        start({"/etc/passwd/x": volume})
    assert {one.sandbox_id for one in Sandbox.list(**node.options).next_items()} == before
    eventually(lambda: not servers(node), 30)
    assert not list(Path(node.run / "volumes").iterdir())
