"""Volumes of sandboxes through their lives: who is served what, in which network, and when no more."""

from __future__ import annotations

import pytest

from agentenv.core.errors import InvalidInput
from agentenv.core.model import LogQuery, Volume
from agentenv.orchestrator.serve_volumes import life
from agentenv.testing.fake_node import FakeNode

MOUNTS = (("data", "/mnt/data"), ("data", "/again"), ("other", "/mnt"))


@pytest.fixture
async def data(node: FakeNode) -> Volume:
    await node.parts.volumes.create("other")
    return await node.parts.volumes.create("data")


def served(node: FakeNode, sandbox_id: str) -> tuple[str, ...] | None:
    record = node.row(sandbox_id).vm
    return None if record is None else node.volume_machine.serving.get(life(sandbox_id, record.run_id))


async def test_a_guest_is_told_what_to_mount_outer_paths_first(node: FakeNode, data: Volume):
    sandbox_id = await node.create(volume_mounts=MOUNTS)
    told = node.process(sandbox_id).identity
    assert told is not None
    assert [path for _, path in told.volume_mounts] == ["/again", "/mnt", "/mnt/data"]
    assert told.volume_mounts[0][0] == f"169.254.0.22:/{data.volume_id}"
    assert served(node, sandbox_id) == ("data", "other")
    record = node.row(sandbox_id).vm
    assert record is not None
    assert node.volume_machine.namespaces[life(sandbox_id, record.run_id)] == node.layout.slot(record.slot).namespace
    assert node.problems() == []


async def test_a_sandbox_without_volumes_has_no_server(node: FakeNode, data: Volume):
    await node.create()
    assert node.volume_machine.serving == {}


async def test_unknown_volumes_end_a_creation_before_anything_starts(node: FakeNode, data: Volume):
    with pytest.raises(InvalidInput, match="#1: volume 'none' not found"):
        await node.create(volume_mounts=(("data", "/a"), ("none", "/b")))
    assert node.parts.store.sandboxes() == []


async def test_service_follows_the_life_of_the_vm(node: FakeNode, data: Volume):
    sandbox_id = await node.create(volume_mounts=MOUNTS)
    await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    assert node.volume_machine.serving == {}
    await node.orchestrator.resume(sandbox_id, 600)
    assert served(node, sandbox_id) == ("data", "other")
    children = [outcome.sandbox for outcome in await node.orchestrator.fork(sandbox_id, 2, 600)]
    assert [served(node, child.sandbox_id) for child in children if child] == [("data", "other")] * 2
    assert [child.volume_mounts for child in children if child] == [node.row(sandbox_id).volume_mounts] * 2
    for one in (sandbox_id, *(child.sandbox_id for child in children if child)):
        await node.orchestrator.kill(one)
    await node.quiesce()
    assert node.volume_machine.serving == {}
    assert node.problems() == []


async def test_a_new_node_server_takes_over(node: FakeNode, data: Volume):
    kept, lost = await node.create(volume_mounts=MOUNTS), await node.create(volume_mounts=MOUNTS)
    node.kill_server()
    node.processes.end(node.process(lost))
    await node.start_server()
    await node.quiesce()
    assert served(node, kept) == ("data", "other")
    assert node.problems() == []


async def test_a_server_that_died_runs_again(node: FakeNode, data: Volume):
    sandbox_id = await node.create(volume_mounts=MOUNTS)
    node.volume_machine.serving.clear()
    for _ in range(25):
        node.clock.advance_ms(250)
        await node.turn()
    assert served(node, sandbox_id) == ("data", "other")
    events = await node.parts.store.events(sandbox_id, LogQuery())
    assert any("volume server" in event.message for event in events)


async def test_a_deleted_volume_is_served_no_more_and_holds_nothing_up(node: FakeNode, data: Volume):
    sandbox_id = await node.create(volume_mounts=MOUNTS)
    await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.volumes.delete(data.volume_id)
    await node.orchestrator.resume(sandbox_id, 600)
    assert served(node, sandbox_id) == ("other",)
    told = node.process(sandbox_id).identity
    assert told is not None
    assert [path for _, path in told.volume_mounts] == ["/mnt"]
    # Another volume of the same name is another volume.
    await node.parts.volumes.create("data")
    await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.resume(sandbox_id, 600)
    assert served(node, sandbox_id) == ("other",)
