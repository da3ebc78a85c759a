"""Rollback of real guests: memory, programs and files as they were, under the same id, address and tokens."""

from __future__ import annotations

import random

import httpx
import pytest
from e2b import SandboxException
from guest_programs import count, start_counter, wait_beyond, wait_for
from test_durability import HOLDER

from agentenv.client import Sandbox

ROUNDS = 4


@pytest.fixture
def own(node):
    """A sandbox of the class with checkpoints."""
    made = Sandbox.create("base", timeout=1800, **node.options)
    yield made
    made.kill()


def _ask(box) -> str:
    """What the holder of memory says of its block: how often it was changed, and its digest."""
    return box.commands.run("touch ask; while [ ! -e answer ]; do sleep 0.02; done; cat answer; rm answer", timeout=120).stdout


def test_memory_programs_and_files_go_back_as_often_as_wanted(own):
    own.files.write("/home/user/holder.py", HOLDER)
    own.commands.run("exec python3 holder.py", background=True, timeout=0)
    start_counter(own)
    said: dict[str, str] = {}
    for number in range(ROUNDS):
        name = f"n{number}"
        own.files.write(f"/home/user/of-{name}", random.Random(number).randbytes(200_000))
        _ask(own)
        own.checkpoint(name)
        said[name] = _ask(own)  # what the next change after the checkpoint must give, each time anew
    digest = own.commands.run("sha256sum of-*").stdout.splitlines()
    for number in random.Random(5).choices(range(ROUNDS), k=2 * ROUNDS):
        own.rollback(f"n{number}")
        assert _ask(own) == said[f"n{number}"], f"memory differs after going back to n{number}"
        assert own.commands.run("sha256sum of-*").stdout.splitlines() == digest[: number + 1]
        wait_beyond(own, count(own))
        own.files.write(f"/home/user/later-{number}", "gone with the next rollback")
    assert [c.name for c in own.checkpoints()] == [f"n{number}" for number in range(ROUNDS)]


def test_id_address_and_tokens_stay_and_connections_end(node, own):
    own.commands.run("python3 -m http.server 8000", background=True, timeout=0)
    url = f"{node.url}/"
    headers = {"E2b-Sandbox-Id": own.sandbox_id, "E2b-Sandbox-Port": "8000"}
    wait_for(lambda: httpx.get(url, headers=headers).status_code == 200, "the server does not answer")
    before = own.commands.run("hostname; cat /proc/sys/kernel/random/boot_id; ip -4 -o address show; pgrep -f http.server").stdout
    with own.checkpoint() as kept:
        own.commands.run("sudo pkill -f '[h]ttp.server'; sudo hostname other; rm -rf /home/user/.bashrc")
        handle = own.commands.run("sleep 1000", background=True, timeout=0)
        randoms = set()
        for _ in range(3):
            kept.rollback()
            assert (
                own.commands.run("hostname; cat /proc/sys/kernel/random/boot_id; ip -4 -o address show; pgrep -f http.server").stdout
                == before
            )
            assert httpx.get(url, headers=headers).status_code == 200
            assert own.files.exists("/home/user/.bashrc")
            randoms.add(own.commands.run("head -c 16 /dev/urandom | od -An -tx1").stdout)
        assert len(randoms) == 3, "each time the guest has randomness of its own"
        with pytest.raises(Exception):  # noqa: B017 - what a broken stream is called differs between releases of the SDK
            handle.wait()
    assert own.checkpoints() == []
    with pytest.raises(SandboxException, match="no checkpoint"):
        own.rollback()


def test_a_paused_one_a_fork_and_a_new_server(node, own):
    own.files.write("/home/user/kept", "first")
    own.checkpoint("first")
    own.files.write("/home/user/kept", "second")
    own.pause()
    own.checkpoint("second")
    own.rollback("first")
    node.kill_server()
    node.up()
    own.connect(timeout=1800)
    assert own.files.read("/home/user/kept") == "first"
    own.rollback("second")
    assert own.files.read("/home/user/kept") == "second"
    (child,) = own.fork(count=1)
    try:
        own.rollback("first")
        assert (own.files.read("/home/user/kept"), child.files.read("/home/user/kept")) == ("first", "second")
    finally:
        child.kill()


def test_many_in_one_call(node):
    made = Sandbox.create_many(3, "base", timeout=600, **node.options)
    try:
        assert len({one.commands.run("hostname").stdout for one in made}) == 3
    finally:
        for one in made:
            one.kill()
