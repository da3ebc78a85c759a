"""Pausing the disk alone, and starting from a disk: what is kept, what is not, and what an unresponsive guest means for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core.errors import GuestUnresponsive, Internal, SnapshotOfAnotherHost, Unavailable
from agentenv.core.lifecycle import State
from agentenv.testing.fake_node import FakeNode


async def _paused(node: FakeNode, memory: bool, **fields: object) -> str:
    sandbox_id = await node.create(**fields)  # type: ignore[arg-type]
    assert node.process(sandbox_id).write("0", "kept")
    await node.orchestrator.pause(sandbox_id, memory=memory)
    await node.quiesce()
    return sandbox_id


@pytest.mark.parametrize(("memory", "mode"), [(True, "full"), (False, "filesystem")])
async def test_a_pause_keeps_what_was_asked(node: FakeNode, memory: bool, mode: str) -> None:
    sandbox_id = await _paused(node, memory)
    row = node.row(sandbox_id)
    assert (row.state, row.pause_mode, row.guest_unresponsive) == (State.PAUSED, mode, False)
    assert node.parts.store.snapshot(row.snapshot_id or "").has_memory is memory
    assert node.content(sandbox_id) == {"booted": "yes", "0": "kept"}
    assert node.problems() == []


@pytest.mark.parametrize(
    ("paused_with", "asked_for", "boots"), [(True, True, False), (True, False, True), (False, True, True), (False, False, True)]
)
async def test_a_guest_boots_when_there_is_no_memory_or_it_is_not_wanted(
    node: FakeNode, paused_with: bool, asked_for: bool, boots: bool
) -> None:
    sandbox_id = await _paused(node, paused_with)
    before, passed = node.row(sandbox_id), len(node.points.passed)
    sandbox, resumed = await node.orchestrator.connect(sandbox_id, 600, memory=asked_for)
    assert resumed
    assert ("vmm.boot" in node.points.passed[passed:], "vmm.restore" in node.points.passed[passed:]) == (boots, not boots)
    assert (sandbox.access_token, sandbox.env_vars, sandbox.metadata) == (before.access_token, before.env_vars, before.metadata)
    assert node.content(sandbox_id) == {"booted": "yes", "0": "kept"}
    await node.quiesce()
    assert node.problems() == []


async def test_ten_cycles_of_every_kind_keep_every_write(node: FakeNode) -> None:
    sandbox_id = await node.create(env_vars={"A": "1"})
    wanted = {"booted": "yes"}
    for cycle in range(10):
        wanted[str(cycle)] = f"written in {cycle}"
        assert node.process(sandbox_id).write(str(cycle), f"written in {cycle}")
        await node.orchestrator.pause(sandbox_id, memory=cycle % 3 != 0)
        await node.orchestrator.connect(sandbox_id, 600, memory=cycle % 4 != 1)
        assert node.content(sandbox_id) == wanted
    await node.quiesce()
    assert node.problems() == []


@pytest.mark.parametrize("memory", [True, False])
async def test_a_boot_needs_no_host_like_the_one_that_made_the_snapshot(node: FakeNode, memory: bool) -> None:
    sandbox_id = await _paused(node, True)
    node.parts.identity = replace(node.parts.identity, vmm_version="2", kernel_sha256="other")
    if memory:
        with pytest.raises(SnapshotOfAnotherHost, match="vmm_version"):
            await node.orchestrator.connect(sandbox_id, 600)
        assert node.row(sandbox_id).state is State.PAUSED
        return
    await node.orchestrator.connect(sandbox_id, 600, memory=False)
    vm = node.row(sandbox_id).vm
    assert vm is not None
    assert vm.identity == node.parts.identity, "its next snapshot would be refused here"


@pytest.mark.parametrize("require", [True, False])
@pytest.mark.parametrize("memory", [True, False])
async def test_a_guest_that_does_not_answer(node: FakeNode, memory: bool, require: bool) -> None:
    """The disk alone is never taken from it; its memory is, unless the caller minds, and then serves for nothing."""
    sandbox_id = await node.create()
    node.process(sandbox_id).hung = True
    node.clock.advance_ms(1000)  # since it was heard of
    if require or not memory:
        with pytest.raises(Unavailable, match="did not answer"):
            await node.orchestrator.pause(sandbox_id, memory, require)
        assert node.row(sandbox_id).state is State.RUNNING
        return
    await node.orchestrator.pause(sandbox_id, memory, require)
    assert node.row(sandbox_id).guest_unresponsive
    for refused in (
        node.orchestrator.connect(sandbox_id, 60),
        node.orchestrator.resume(sandbox_id, 60),
        node.orchestrator.fork(sandbox_id, 1, 60),
    ):
        with pytest.raises(GuestUnresponsive):
            await refused
    assert node.row(sandbox_id).state is State.PAUSED
    sandbox, _ = await node.orchestrator.connect(sandbox_id, 60, memory=False)
    assert not sandbox.guest_unresponsive
    await node.quiesce()
    assert node.problems() == []


@pytest.mark.parametrize(("heard_ago_ms", "require", "asked"), [(0, False, 0), (999, False, 0), (1000, False, 1), (0, True, 1)])
@pytest.mark.parametrize("heard", ["start", "traffic", "never"])
async def test_a_guest_that_has_just_answered_is_not_asked_again(
    node: FakeNode, heard: str, heard_ago_ms: int, require: bool, asked: int
) -> None:
    """Unless the caller minds; a server that has just taken over has heard nothing."""
    sandbox_id = await node.create()
    if heard != "start":
        node.clock.advance_ms(5000)
    if heard == "traffic":
        node.orchestrator.heard(sandbox_id)
    node.clock.advance_ms(heard_ago_ms)
    before = node.points.passed.count("guest.answers")
    await node.orchestrator.pause(sandbox_id, True, require)
    assert node.points.passed.count("guest.answers") - before == (1 if heard == "never" else asked)
    assert not node.row(sandbox_id).guest_unresponsive
    assert sandbox_id not in node.parts.shared.heard_ms, "what one life of its VM has answered says nothing of the next"


async def test_a_pause_that_failed_asks_the_guest_when_it_is_repeated(node: FakeNode) -> None:
    sandbox_id = await node.create()
    node.points.fail("blocks.seal")
    with pytest.raises(Internal):
        await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.pause(sandbox_id)
    assert node.points.passed.count("guest.answers") == 1


@pytest.mark.parametrize("answers", [True, False])
async def test_the_pause_at_a_timeout_keeps_the_disk_alone_if_the_guest_answers_and_everything_if_not(
    node: FakeNode, answers: bool
) -> None:
    sandbox_id = await node.create(60, on_timeout="pause", auto_pause_memory=False)
    node.process(sandbox_id).hung = not answers
    node.clock.advance_ms(60_000)
    await node.quiesce()
    row = node.row(sandbox_id)
    assert (row.state, row.pause_mode, row.guest_unresponsive) == (State.PAUSED, "filesystem" if answers else "full", not answers)
    assert node.problems() == []


@pytest.mark.parametrize("point", ["guest.freeze", "guest.freeze:done", "vm.pause", "blocks.seal", "blocks.seal:done"])
async def test_a_pause_of_the_disk_that_fails_leaves_the_guests_files_writable(node: FakeNode, point: str) -> None:
    sandbox_id = await node.create()
    node.points.fail(point)
    with pytest.raises(Exception, match=r"injected|fail"):
        await node.orchestrator.pause(sandbox_id, memory=False)
    await node.quiesce()
    assert node.row(sandbox_id).state is State.RUNNING
    assert node.process(sandbox_id).write("0", "after"), "its file system is still frozen"
    assert node.problems() == []


async def test_a_server_killed_between_freeze_and_record_leaves_the_guest_running_and_writable(ram_path: Path) -> None:
    node = FakeNode(ram_path / "node")
    await node.start_server()
    sandbox_id = await node.create()
    with node.points.hold("vm.pause") as reached:
        pausing = asyncio.ensure_future(node.orchestrator.pause(sandbox_id, memory=False))
        await reached.wait()
        node.kill_server()
        await node.start_server()
    await node.quiesce()
    assert node.row(sandbox_id).state is State.RUNNING
    assert node.process(sandbox_id).write("0", "after")
    assert node.problems() == []
    pausing.cancel()
    await node.close()


async def test_children_of_a_disk_boot_and_have_their_own_identity(node: FakeNode) -> None:
    sandbox_id = await _paused(node, False)
    passed = len(node.points.passed)
    outcomes = await node.orchestrator.fork(sandbox_id, 2, 600)
    children = [outcome.sandbox for outcome in outcomes if outcome.sandbox is not None]
    assert len(children) == 2
    assert node.points.passed[passed:].count("vmm.boot") == 2
    assert len({node.row(sandbox_id).access_token, *(child.access_token for child in children)}) == 3
    for child in children:
        assert node.content(child.sandbox_id) == {"booted": "yes", "0": "kept"}
    await node.quiesce()
    assert node.problems() == []


@pytest.mark.parametrize("on_timeout", ["kill", "pause", None])
async def test_a_resume_changes_the_policy_only_when_asked(node: FakeNode, on_timeout: str | None) -> None:
    sandbox_id = await _paused(node, True, on_timeout="pause")
    sandbox = await node.orchestrator.resume(sandbox_id, 60, on_timeout=on_timeout)  # type: ignore[arg-type]
    assert sandbox.on_timeout == (on_timeout or "pause")


@pytest.mark.parametrize("source", ["running", "paused with memory", "paused without"])
async def test_a_snapshot_of_the_disk_alone_is_booted_from_and_leaves_its_source_as_it_was(node: FakeNode, source: str) -> None:
    sandbox_id = await node.create() if source == "running" else await _paused(node, source == "paused with memory")
    before = node.row(sandbox_id)
    expected = node.content(sandbox_id)
    await node.orchestrator.snapshot(sandbox_id, "mine", memory=False)
    after = node.row(sandbox_id)
    assert (after.state, after.pause_mode, after.snapshot_id) == (before.state, before.pause_mode, before.snapshot_id)
    if source == "running":
        assert node.process(sandbox_id).write("9", "after"), "its file system is still frozen"
    passed = len(node.points.passed)
    made = await node.create(template="mine")
    assert "vmm.boot" in node.points.passed[passed:]
    assert node.content(made) == expected
    await node.orchestrator.connect(sandbox_id, 60)
    await node.quiesce()
    assert node.problems() == []


async def test_a_snapshot_of_the_disk_needs_a_guest_that_answers(node: FakeNode) -> None:
    sandbox_id = await node.create()
    node.process(sandbox_id).hung = True
    with pytest.raises(Unavailable):
        await node.orchestrator.snapshot(sandbox_id, "mine", memory=False)
    await node.quiesce()
    assert node.row(sandbox_id).state is State.RUNNING
    assert node.problems() == []
