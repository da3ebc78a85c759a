"""Checkpoints and rollback: the same sandbox becomes what it was, any number of times, and nothing is left when it ends."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.config.schema import VmmConfig
from agentenv.core.errors import Conflict, InvalidInput, LimitReached, NotFound, StorageFull
from agentenv.core.lifecycle import State
from agentenv.testing.fake_node import FakeNode


async def _rest(node: FakeNode) -> None:
    await node.quiesce()
    assert node.problems() == []


async def _tree(node: FakeNode, names: str) -> str:
    """A sandbox that wrote each letter of `names` and took a checkpoint called by it."""
    sandbox_id = await node.create()
    for name in names:
        assert node.process(sandbox_id).write("0", name)
        await node.orchestrator.checkpoint(sandbox_id, name)
    return sandbox_id


@pytest.mark.parametrize("paused", [False, True])
async def test_back_and_forth_in_a_tree(node: FakeNode, paused: bool) -> None:
    sandbox_id = await _tree(node, "abc")
    before = node.row(sandbox_id)
    for name in "acbac":
        if paused and node.row(sandbox_id).state is State.RUNNING:
            await node.orchestrator.pause(sandbox_id)
        back = await node.orchestrator.rollback(sandbox_id, name)
        assert back.state is (State.PAUSED if paused else State.RUNNING)
        assert node.content(sandbox_id)["0"] == name
        after = node.row(sandbox_id)
        assert (after.access_token, after.end_at_ms, after.started_at_ms) == (before.access_token, before.end_at_ms, before.started_at_ms)
        await _rest(node)
    found = {c.name: c for c in await node.orchestrator.checkpoints(sandbox_id)}
    assert [found[name].parent_id for name in "abc"] == ["", found["a"].checkpoint_id, found["b"].checkpoint_id]
    await node.orchestrator.kill(sandbox_id)
    await _rest(node)
    assert node.parts.store.checkpoints.all() == []


async def test_a_branch_grows_from_where_it_went_back_to(node: FakeNode) -> None:
    sandbox_id = await _tree(node, "ab")
    await node.orchestrator.rollback(sandbox_id, "a")
    assert node.process(sandbox_id).write("0", "x")
    branch = await node.orchestrator.checkpoint(sandbox_id, "x")
    found = {c.name: c for c in await node.orchestrator.checkpoints(sandbox_id)}
    assert branch.parent_id == found["a"].checkpoint_id == found["b"].parent_id
    await node.orchestrator.rollback(sandbox_id)  # without a name: the one it descends from
    assert node.content(sandbox_id)["0"] == "x"
    await _rest(node)


async def test_deleting_leaves_the_descendants_and_frees_what_was_its_own(node: FakeNode) -> None:
    sandbox_id = await _tree(node, "abc")
    snapshots = len(node.parts.store.snapshots())
    for name in "ba":
        await node.orchestrator.remove_checkpoint(sandbox_id, name)
        await _rest(node)
    assert len(node.parts.store.snapshots()) == snapshots - 2
    [left] = await node.orchestrator.checkpoints(sandbox_id)
    assert (left.name, left.parent_id) == ("c", "")
    await node.orchestrator.remove_checkpoint(sandbox_id, left.checkpoint_id)
    with pytest.raises(InvalidInput, match="no checkpoint to go back to"):
        await node.orchestrator.rollback(sandbox_id)
    await _rest(node)


async def test_what_cannot_be_is_refused_and_changes_nothing(node: FakeNode) -> None:
    sandbox_id, other = await _tree(node, "ab"), await _tree(node, "z")
    [foreign] = await node.orchestrator.checkpoints(other)
    for reference in (foreign.checkpoint_id, "z", "nothing"):
        with pytest.raises(NotFound, match="has no checkpoint"):
            await node.orchestrator.rollback(sandbox_id, reference)
    with pytest.raises(Conflict, match="already"):
        await node.orchestrator.checkpoint(sandbox_id, "a")
    for name in ("-x", "a b", "ü", "x" * 129, foreign.checkpoint_id):
        with pytest.raises(InvalidInput, match="cannot name a checkpoint"):
            await node.orchestrator.checkpoint(sandbox_id, name)
    limits = node.config.limits.model_copy(update={"checkpoints_of_sandbox": 2})
    node.parts.config = node.config.model_copy(update={"limits": limits})
    with pytest.raises(LimitReached, match="its limit"):
        await node.orchestrator.checkpoint(sandbox_id, "c")
    await node.orchestrator.kill(other)
    with pytest.raises(NotFound, match="doesn't exist"):
        await node.orchestrator.rollback(other, "z")
    assert node.content(sandbox_id)["0"] == "b"
    await _rest(node)


@pytest.mark.parametrize("point", ["vm.pause", "slots.acquire", "blocks.open", "vmm.restore", "guest.initialise", "store.commit"])
async def test_when_it_fails_the_sandbox_goes_on_as_it_was(node: FakeNode, point: str) -> None:
    sandbox_id = await _tree(node, "a")
    assert node.process(sandbox_id).write("0", "later")
    pid = node.process(sandbox_id).process.pid
    node.points.fail(point, at=1, error=StorageFull("full"))
    with pytest.raises(StorageFull):
        await node.orchestrator.rollback(sandbox_id, "a")
    assert (node.row(sandbox_id).state, node.process(sandbox_id).process.pid) == (State.RUNNING, pid)
    assert node.content(sandbox_id)["0"] == "later"
    await _rest(node)
    await node.orchestrator.rollback(sandbox_id, "a")
    assert node.content(sandbox_id)["0"] == "a"
    await _rest(node)


async def test_when_even_the_way_back_fails_it_is_gone_a_little_later(node: FakeNode) -> None:
    """The restore fails, and so does the commit that says that the old VM goes on."""
    sandbox_id = await _tree(node, "a")
    assert node.process(sandbox_id).write("0", "later")
    node.points.fail("vmm.restore", at=1, error=StorageFull("full"))
    node.points.fail("store.commit", at=3, error=StorageFull("full"))
    with pytest.raises(StorageFull):
        await node.orchestrator.rollback(sandbox_id, "a")
    assert node.row(sandbox_id).state is State.ROLLING_BACK
    await _rest(node)
    assert (node.row(sandbox_id).state, node.content(sandbox_id)["0"]) == (State.RUNNING, "later")


async def test_a_kill_while_it_is_stuck_frees_both_vms(node: FakeNode) -> None:
    sandbox_id = await _tree(node, "a")
    node.points.fail("vmm.restore", at=1, error=StorageFull("full"))
    node.points.fail("store.commit", at=3, error=StorageFull("full"))
    with pytest.raises(StorageFull):
        await node.orchestrator.rollback(sandbox_id, "a")
    await node.orchestrator.kill(sandbox_id)
    await _rest(node)
    assert node.processes.alive() == []


async def test_a_checkpoint_of_the_disk_alone_is_booted(node: FakeNode) -> None:
    sandbox_id = await node.create()
    assert node.process(sandbox_id).write("0", "kept")
    await node.orchestrator.checkpoint(sandbox_id, "disk", memory=False)
    assert node.process(sandbox_id).write("0", "later")
    boots = node.points.passed.count("vmm.boot")
    await node.orchestrator.rollback(sandbox_id, "disk")
    assert node.points.passed.count("vmm.boot") == boots + 1
    assert node.content(sandbox_id)["0"] == "kept"
    await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.rollback(sandbox_id, "disk")
    assert node.row(sandbox_id).pause_mode == "filesystem"
    await _rest(node)


async def test_a_fork_has_none_of_its_sources_checkpoints(node: FakeNode) -> None:
    sandbox_id = await _tree(node, "a")
    child = (await node.orchestrator.fork(sandbox_id, 1, 600))[0].sandbox
    assert child is not None
    assert await node.orchestrator.checkpoints(child.sandbox_id) == []
    with pytest.raises(InvalidInput):
        await node.orchestrator.rollback(child.sandbox_id)
    await node.orchestrator.kill(sandbox_id)
    assert node.process(child.sandbox_id).write("0", "on")
    await node.orchestrator.pause(child.sandbox_id)
    await _rest(node)


@pytest.mark.parametrize("copied_mb", [0, 16])
async def test_long_histories_keep_every_checkpoint_readable(node: FakeNode, copied_mb: int) -> None:
    """Chains are merged while checkpoints hold their middle."""
    limits = node.config.limits.model_copy(update={"layers_in_chain": 4})
    node.parts.config = node.config.model_copy(update={"limits": limits, "vmm": VmmConfig(own_memory_copied_mb=copied_mb)})
    sandbox_id = await node.create()
    for number in range(20):
        assert node.process(sandbox_id).write(str(number % 6), str(number))
        await node.orchestrator.checkpoint(sandbox_id, f"n{number}")
        if number % 7 == 6:
            await node.orchestrator.rollback(sandbox_id, f"n{number - 3}")
        await node.quiesce()
    for number in (0, 19, 7, 13):
        await node.orchestrator.rollback(sandbox_id, f"n{number}")
        assert node.content(sandbox_id)[str(number % 6)] == str(number)
    await _rest(node)


async def test_many_at_once_each_has_its_outcome(node: FakeNode) -> None:
    sandbox_id = await _tree(node, "a")
    asked = [node.orchestrator.rollback(sandbox_id, "a") for _ in range(5)]
    asked += [node.orchestrator.rollback(sandbox_id, "nothing")]
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(one, NotFound) for one in done] == [False] * 5 + [True]
    await _rest(node)
