"""Forks and snapshots of real guests: what is each one's own, and what outlives what (cases D).

Elsewhere: D10 unit test_orchestrator_fail_at_step; D11 unit test_orchestrator_forks_and_snapshots; D13 test_damage; D14 unit
test_orchestrator_fork and test_api_lifecycle. `AENV_CASES=full` takes the amounts of the reports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from crashes import vmms
from e2b import Sandbox, SandboxState
from guest_programs import wait_for
from test_cases_c import FULL_TIMEOUT, many

from agentenv.client import Sandbox as OwnSandbox

pytestmark = FULL_TIMEOUT

#: Started before the fork; tells random numbers of each kind whenever it is asked.
HELLO = r"""
import contextlib, ssl
def hello():  # the random of the first message of a TLS client
    arrives, leaves, settings = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        settings.wrap_bio(arrives, leaves, server_hostname="example.com").do_handshake()
    return leaves.read()[11:43].hex()
"""
TELLER = (
    HELLO
    + r"""
import json, os, random, secrets, uuid
seeded, opened = random.Random(7), open("/dev/urandom", "rb", 0)
for name in ("ask", "told"):
    os.mkfifo(name)
while True:
    open("ask").read()  # waits without a cost: seventeen guests that look again and again are slow
    told = {"uuid4": str(uuid.uuid4()), "secrets": secrets.token_hex(16), "urandom": os.urandom(16).hex(),
            "getrandom": os.getrandom(16).hex(), "opened": opened.read(16).hex(),
            "SystemRandom": secrets.SystemRandom().random(), "ssl": ssl.RAND_bytes(16).hex(), "hello": hello(),
            "seeded": seeded.random(), "random": random.random()}
    with open("told", "w") as out:
        json.dump(told, out)
"""
)
#: What draws from the kernel each time; the others keep their state in the program's own memory, which a fork copies.
FROM_THE_KERNEL = ("uuid4", "secrets", "urandom", "getrandom", "opened", "SystemRandom")
IN_THE_PROGRAM = ("seeded", "random", "ssl", "hello")


#: Of a generation of D04, how many have children: with all, the tree of the report is 341 guests, and 150 had 2 cores at a load of 130.
PARENTS_MOST = 2 if (os.cpu_count() or 1) < 16 else 64


PAGE = Path(__file__).parents[2] / "docs/forks.md"


@pytest.fixture
def source(node) -> Iterator[Any]:
    made = OwnSandbox.create("base", timeout=3600, **node.options)
    yield made
    made.kill()


def killed(boxes: list[Any]) -> None:
    for box in boxes:
        box.kill()


def ask(box: Any) -> dict[str, Any]:
    return json.loads(box.commands.run("echo > ask; cat told", timeout=60).stdout)


def forked(box: Any, count: int) -> list[Any]:
    children = box.fork_many(count, timeout=3600)
    assert [child for child in children if isinstance(child, Exception)] == []
    assert len(children) == count
    return children


# --- D01, D02 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fork", "snapshot"])
def test_d01_everyone_draws_numbers_of_its_own_from_the_kernel(node, source, how):
    source.files.write("teller.py", TELLER)
    source.commands.run("exec python3 teller.py", background=True, timeout=0)
    wait_for(lambda: source.files.exists("told"), "the teller does not start")
    ask(source)
    if how == "fork":
        boxes = forked(source, many(3, 16))
    else:
        kept = source.create_snapshot()
        boxes = [Sandbox.create(kept.snapshot_id, timeout=3600, **node.options) for _ in range(2)]
    first = [box.commands.run("head -c 1024 /dev/urandom | sha256sum").stdout for box in boxes]
    assert len(set(first)) == len(boxes), "the first random bytes of two are the same"
    told = [ask(box) for box in boxes]
    for name in FROM_THE_KERNEL:
        assert len({one[name] for one in told}) == len(boxes), f"{name} repeats"
    for name in IN_THE_PROGRAM:  # as docs/forks.md says; it is the program's own memory
        assert len({one[name] for one in told}) == 1, f"{name} is each one's own now: say so in docs/forks.md"
    for box in boxes:
        box.files.write("new.py", HELLO + "import random\nprint(random.random(), ssl.RAND_bytes(8).hex(), hello())")
    new = [box.commands.run("python3 new.py").stdout.split() for box in boxes]
    for place, name in enumerate(("random", "ssl", "hello of TLS")):
        assert len({one[place] for one in new}) == len(boxes), f"{name}: programs that start later repeat each other"
    assert not any(set(one) & {*old.values()} for one in new for old in told)
    killed(boxes)
    if how == "snapshot":
        Sandbox.delete_snapshot(kept.snapshot_id, **node.options)


IDENTITY = "cat /run/e2b/.E2B_SANDBOX_ID; echo; hostname; cat /etc/hostname /etc/machine-id /proc/sys/kernel/random/boot_id"
#: A hook of a template: what watches the sandbox's id makes its keys anew when it changes.
HOOK = """
last=$(cat /run/e2b/.E2B_SANDBOX_ID)
while :; do
  now=$(cat /run/e2b/.E2B_SANDBOX_ID)
  if [ "$now" != "$last" ] || [ ! -e key ]; then head -c 32 /dev/urandom | od -An -tx1 > .key; mv .key key; last=$now; fi
  sleep 0.1
done
"""


def test_d02_identity_is_each_ones_own_and_stays_over_a_pause(source):
    source.files.write("hook.sh", HOOK)
    source.commands.run("exec sh hook.sh", background=True, timeout=0)
    wait_for(lambda: source.files.exists("key"), "the hook does not start")
    source.commands.run("cat /proc/sys/kernel/random/boot_id")  # the kernel makes it up when it is first read
    children = forked(source, 2)
    everyone = [source, *children]
    told = [box.commands.run(IDENTITY).stdout.split() for box in everyone]
    for box, (fact, hostname, hostname_file, _, _) in zip(everyone, told, strict=True):
        assert fact == hostname == hostname_file == box.sandbox_id
    assert len({machine_id for *_, machine_id, _ in told}) == 3
    assert len({boot_id for *_, boot_id in told}) == 1, "one boot, so one boot id"
    wait_for(lambda: len({box.files.read("key") for box in everyone}) == 3, "the hook did not make keys anew")
    children[0].pause()
    children[0].connect(timeout=3600)
    assert children[0].commands.run(IDENTITY).stdout.split() == told[1], "a resume changes who it is"
    killed(children)


def host_key(box: Any) -> str:
    """Empty while the hook has removed one and not made the next."""
    return box.commands.run("cat /etc/ssh/ssh_host_ed25519_key 2> /dev/null || true", user="root").stdout


def test_d02_the_hook_of_the_page_makes_host_keys_anew(source):
    """What docs/forks.md shows, run as it stands there; where a template has no OpenSSH, what makes keys is a stand-in."""
    hook = PAGE.read_text().split("## Keys that must not be copied")[1].split("```sh\n")[1].split("```")[0]
    source.files.write("/tmp/ssh-keygen", "#!/bin/sh\nhead -c 32 /dev/urandom | od -An -tx1 > /etc/ssh/ssh_host_ed25519_key\n")
    source.commands.run("command -v ssh-keygen || install -m 755 /tmp/ssh-keygen /usr/bin/; mkdir -p /etc/ssh; ssh-keygen -A", user="root")
    source.files.write("hook.sh", hook)
    source.commands.run("exec sh hook.sh", background=True, timeout=0, user="root")
    wait_for(lambda: source.commands.run("pgrep -x sleep || true").stdout, "the hook does not start")
    own = host_key(source)
    assert own
    children = forked(source, 2)
    wait_for(lambda: len({host_key(box) for box in children} - {"", own}) == 2, "a child has the keys of another")
    assert host_key(source) == own, "the source is who it was"
    key = host_key(children[0])
    children[0].pause()
    children[0].connect(timeout=3600)
    assert host_key(children[0]) == key, "a resume makes it nobody else"
    killed(children)


# --- D04, D05 ----------------------------------------------------------------------------------------------------------


def port_8000(node: Any, box: Any) -> str:
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "8000"}
    return httpx.get(f"{node.url}/who", headers=headers, timeout=60).text


def test_d04_a_tree_of_forks_lives_side_by_side(node, source):
    source.commands.run("exec python3 -m http.server 8000", background=True, timeout=0)
    wait_for(lambda: "8000" in source.commands.run("ss -Hltn").stdout, "the server does not come up")
    alive, generation = [source], [source]
    width, depth = many(2, 4), many(2, 4)
    try:
        for _ in range(depth):
            parents = [*generation[:1], *generation[1:][-PARENTS_MOST + 1 :]]  # those furthest from each other
            with ThreadPoolExecutor(2) as lanes:
                generation = [child for children in lanes.map(lambda parent: forked(parent, width), parents) for child in children]
            alive += generation
        assert len({box.sandbox_id for box in alive}) == len(alive)
        for box in alive:
            box.files.write("who", box.sandbox_id)
        assert [port_8000(node, box) for box in alive] == [box.sandbox_id for box in alive]
        links = [box.commands.run("ip -4 -o address show scope global; ip route").stdout for box in alive]
        assert len(set(links)) == 1, "inside, all have one address"
        for victim in (alive[1], alive[0]):
            victim.kill()
            alive.remove(victim)
            assert [port_8000(node, box) for box in alive] == [box.sandbox_id for box in alive], "one took another's network with it"
    finally:
        killed(alive)


def test_d05_children_need_nothing_of_a_source_that_is_gone(node):
    source = OwnSandbox.create("base", timeout=3600, **node.options)
    source.files.write("kept", "x" * 300_000)
    children = forked(source, 3)
    source.kill()
    node.aenv("gc", "--all")
    try:
        for number, child in enumerate(children):
            assert child.files.read("kept") == "x" * 300_000
            child.commands.run("sync; echo 3 | sudo tee /proc/sys/vm/drop_caches > /dev/null; sha256sum /usr/bin/python3* /bin/bash > sums")
            child.files.write("own", str(number))
            child.pause()
            child.connect(timeout=3600)
            assert "FAILED" not in child.commands.run("sha256sum -c sums").stdout
            (grandchild,) = forked(child, 1)
            assert grandchild.files.read("own") == str(number)
            grandchild.kill()
            child.checkpoint("here")
            child.files.write("own", "later")
            child.rollback("here")
            assert child.files.read("own") == str(number)
    finally:
        killed(children)


# --- D07, D08 ----------------------------------------------------------------------------------------------------------


def test_d07_a_paused_source_has_no_vm_and_its_snapshot_outlives_it(node):
    source = OwnSandbox.create("base", timeout=3600, **node.options)
    source.commands.run("echo kept > f; echo held > /dev/shm/f")
    source.pause()
    wait_for(lambda: source.sandbox_id not in vmms(node), "its VMM lives on")
    with ThreadPoolExecutor(1) as lane:
        forking = lane.submit(forked, source, many(4, 32))
        while not forking.done():
            assert source.sandbox_id not in vmms(node)
    children = forking.result()
    try:
        assert source.get_info().state is SandboxState.PAUSED
        assert {child.commands.run("cat f /dev/shm/f").stdout for child in children} == {"kept\nheld\n"}
        source.create_snapshot(name="d07")
        source.kill()
        made = Sandbox.create("d07", timeout=600, **node.options)
        assert made.commands.run("cat f /dev/shm/f").stdout == "kept\nheld\n"
        made.kill()
        Sandbox.delete_snapshot("d07", **node.options)
    finally:
        killed([*children, source])


def test_d08_tokens_are_each_ones_own_and_outlive_pause_and_restart(node, source):
    children = forked(source, 2)
    everyone = [source, *children]

    def status(box: Any, token: str) -> int:
        headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": token}
        query = {"path": "/etc/hostname", "username": "user"}
        return httpx.get(f"{node.url}/files", params=query, headers=headers, timeout=60).status_code

    def check() -> None:
        for box in everyone:
            for other in everyone:
                assert status(box, other._envd_access_token) == (200 if box is other else 401)

    check()
    children[0].pause()
    node.kill_server()
    node.up()
    children[0].connect(timeout=3600)
    check()
    killed(children)
