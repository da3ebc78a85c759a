"""Snapshots of real guests: files and running programs at one instant, for others to go on from."""

from __future__ import annotations

import asyncio
import json

import pytest
from e2b import AsyncSandbox, Sandbox, SandboxException, Template
from guest_programs import count, start_counter, wait_beyond, wait_for


def _layers(node) -> set[str]:
    return {path.name for path in (node.home / "layers").iterdir()}


def test_two_go_on_from_a_running_one(node, sandbox):
    sandbox.files.write("/home/user/kept", "at the instant")
    start_counter(sandbox)
    wait_beyond(sandbox, 3)
    snapshot = sandbox.create_snapshot(name="e2e-running")
    try:
        reached = count(sandbox)
        wait_beyond(sandbox, reached)
        sandbox.files.write("/home/user/kept", "later")
        made = [
            Sandbox.create(name, timeout=600, envs={"WHO": str(n)}, **node.options)
            for n, name in enumerate((snapshot.snapshot_id, "e2e-running"))
        ]
        try:
            for n, one in enumerate(made):
                assert one.files.read("/home/user/kept") == "at the instant"
                wait_beyond(one, 0)
                wait_beyond(one, count(one))
                assert one.commands.run("hostname; echo $WHO").stdout == f"{one.sandbox_id}\n{n}\n"
                one.files.write("/home/user/kept", f"of {n}")
            assert [one.files.read("/home/user/kept") for one in made] == ["of 0", "of 1"]
            assert sandbox.files.read("/home/user/kept") == "later"
            randoms = {one.commands.run("head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid").stdout for one in made}
            assert len(randoms) == 2
            infos = [one.get_info() for one in (sandbox, *made)]
            assert {(info.cpu_count, info.memory_mb) for info in infos} == {(infos[0].cpu_count, infos[0].memory_mb)}
            assert [info.name for info in infos] == ["base", "e2e-running", "e2e-running"]
            with pytest.raises(SandboxException, match="cannot delete"):
                Sandbox.delete_snapshot(snapshot.snapshot_id, **node.options)
            made[0].pause()
            made[0].connect()
            assert made[0].files.read("/home/user/kept") == "of 0"
        finally:
            for one in made:
                one.kill()
    finally:
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **node.options) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **node.options) is False
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create(snapshot.snapshot_id, **node.options)
    wait_beyond(sandbox, count(sandbox))


def test_it_outlives_its_source_and_the_server_and_its_bytes_go_with_it(node):
    before = _layers(node)
    source = Sandbox.create("base", timeout=600, **node.options)
    try:
        source.files.write("/home/user/kept", "x" * 100_000)
        source.commands.run("head -c 2000000 /dev/urandom > /home/user/big; sync; sha256sum /home/user/big > /home/user/sum")
        source.pause()
        snapshot = source.create_snapshot()
    finally:
        source.kill()
    node.kill_server()
    node.up()
    assert [item.snapshot_id for item in Sandbox.list_snapshots(sandbox_id=source.sandbox_id, **node.options).next_items()] == [
        snapshot.snapshot_id
    ]
    made = Sandbox.create(snapshot.snapshot_id, timeout=600, **node.options)
    try:
        assert made.files.read("/home/user/kept") == "x" * 100_000
        assert made.commands.run("sha256sum -c /home/user/sum").stdout.endswith("OK\n")
    finally:
        made.kill()
    assert _layers(node) - before, "the snapshot has layers of its own"
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **node.options) is True
    wait_for(lambda: _layers(node) <= before, "the layers of a deleted snapshot stay")


def test_a_name_with_tags(node, sandbox):
    api = {name: node.options[name] for name in ("api_key", "api_url")}
    for version in ("v1", "v2"):
        sandbox.files.write("/home/user/version", version)
        sandbox.create_snapshot(name=f"e2e-tagged:{version}")
    Template.assign_tags("e2e-tagged:v1", "default", **api)
    for name, version in (("e2e-tagged", "v1"), ("local/e2e-tagged:v2", "v2")):
        one = Sandbox.create(name, timeout=600, **node.options)
        assert one.files.read("/home/user/version") == version
        one.kill()
    assert [tag.tag for tag in Template.get_tags("e2e-tagged", **api)] == ["default", "v1", "v2"]
    assert Sandbox.delete_snapshot("e2e-tagged", **node.options) is True
    assert not Template.exists("e2e-tagged", **api)


async def test_a_walk_in_which_each_step_is_a_sandbox_made_from_the_snapshot_of_the_one_before(node):
    """Eight generations: chains are merged on the way (the node of these tests merges from five layers on)."""
    sandbox = await AsyncSandbox.create("base", timeout=600, **node.options)
    former = None
    for step in range(8):
        await sandbox.commands.run(f"echo {step} >> /home/user/walk; echo {step} > /dev/shm/step")
        snapshot = await sandbox.create_snapshot()
        following, _ = await asyncio.gather(AsyncSandbox.create(snapshot.snapshot_id, timeout=600, **node.options), sandbox.kill())
        if former is not None:
            assert await AsyncSandbox.delete_snapshot(former.snapshot_id, **node.options)
        sandbox, former = following, snapshot
    try:
        assert (await sandbox.files.read("/home/user/walk")).split() == [str(step) for step in range(8)]
        assert (await sandbox.files.read("/dev/shm/step")).strip() == "7"
    finally:
        await sandbox.kill()
    assert former is not None
    assert await AsyncSandbox.delete_snapshot(former.snapshot_id, **node.options)


def test_snapshots_are_no_templates_in_the_list(node, sandbox):
    snapshot = sandbox.create_snapshot()
    listed = json.loads(node.aenv("templates", "--json").stdout)
    assert [item["names"] for item in listed if "base" in item["names"]] == [["base"]]
    assert snapshot.snapshot_id.partition(":")[0] not in [item["templateID"] for item in listed]
    Sandbox.delete_snapshot(snapshot.snapshot_id, **node.options)
