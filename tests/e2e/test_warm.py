"""VMs that stand ready, on real guests: a create wakes one, which is then this sandbox and no other; a killed server leaves none."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from e2b import Sandbox
from e2e_node import Node
from guest_programs import wait_for


@pytest.fixture
def warm_node(node: Node) -> Iterator[Node]:
    """The node of the session, keeping one VM ready of each template in use."""
    node.kill_server()
    off = node.environment.pop("AENV_WARM_SANDBOXES")  # so that it does what it does by default
    node.up()
    yield node
    node.kill_server()
    node.environment["AENV_WARM_SANDBOXES"] = off
    node.up()


def _ready(node: Node) -> set[str]:
    """The sandbox ids of VMs that stand ready and that no sandbox has."""
    there = {name.rpartition("-")[0] for name in _folders(node)}
    said = set(re.findall(r"(\w+) stands ready", (node.home / "log" / "server.log").read_text()))
    return (there & said) - {item.sandbox_id for item in Sandbox.list(**node.options).next_items()}


def test_a_create_wakes_one_that_is_then_nobody_elses(warm_node: Node) -> None:
    made: list[Sandbox] = []
    Sandbox.create("base", timeout=600, **warm_node.options).kill()  # once is not often: the next one finds none, either
    try:
        for number in range(3):
            ready = _ready(warm_node)
            one = Sandbox.create("base", timeout=600, envs={"WHO": str(number)}, **warm_node.options)
            made.append(one)
            assert number == 0 or {one.sandbox_id} == ready, "it was not the one that stood ready"
            assert one.commands.run("hostname; echo $WHO; whoami; pwd").stdout.split() == [
                one.sandbox_id,
                str(number),
                "user",
                "/home/user",
            ]
            one.files.write("kept", str(number))
            wait_for(lambda: len(_ready(warm_node)) == 1, "no further one was made")
        said = {one.commands.run("head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid").stdout for one in made}
        assert len(said) == 3
        made[2].pause()
        made[2].connect(timeout=600)
        assert [one.files.read("kept") for one in made] == ["0", "1", "2"]
        now_s = float(made[1].commands.run("date +%s").stdout)
        assert abs(now_s - float(made[2].commands.run("date +%s").stdout)) < 120, "a guest that stood still has the time of now"
        warm_node.kill_server()
        stood = _folders(warm_node)
        warm_node.up()
        wait_for(lambda: _folders(warm_node) < stood, "what stood ready outlives its server")
        assert [one.files.read("kept") for one in made] == ["0", "1", "2"]
    finally:
        for one in made:
            one.kill()


def _folders(node: Node) -> set[str]:
    return {folder.name for folder in (node.run / "vms").iterdir()}
