"""The server is killed: at every step of every verb, and while nothing happens. The next one finds everything or undoes it."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_orchestrator_fail_at_step import CAPTURES, VERBS, begin

from agentenv.core.errors import AgentEnvError, Conflict, Internal, SnapshotOfAnotherHost
from agentenv.core.lifecycle import State
from agentenv.core.model import Creation, LogQuery
from agentenv.host import process
from agentenv.host.process import ProcessId
from agentenv.orchestrator.serve_volumes import life
from agentenv.testing.fake_node import FakeNode
from agentenv.testing.fake_vmm import FakeProcess

_STEPS_MAX = 60
_RESTING = (State.RUNNING, State.PAUSED, State.KILLED)


async def _kill_at(folder: Path, name: str, step: int, writes_memory: bool = False) -> bool:
    """Kill the server when the verb has passed `step` points; False when it has fewer."""
    verb, before, allowed = VERBS[name]
    node = FakeNode(folder, writes_memory=writes_memory)
    await node.start_server()
    await node.parts.volumes.create("data")  # what the verbs of the table mount
    sandbox_id = await node.create()
    assert node.process(sandbox_id).write("0", "before")
    await node.orchestrator.checkpoint(sandbox_id, "start")
    if before is State.PAUSED:
        await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    task, passed = await begin(node, name, sandbox_id, step)
    reached = len(passed) >= step
    node.kill_server()
    where = f"{name}: server killed after {passed}"
    await node.start_server()
    await node.quiesce()
    assert node.problems() == [], where
    row = node.row(sandbox_id)
    at_checkpoint = row.state is State.PAUSED and name.startswith("rollback")  # it went on from there: the old VM is gone
    assert row.state in allowed | {before} or at_checkpoint, where
    if row.state is not State.KILLED:
        assert node.content(sandbox_id) == {"booted": "yes", "0": "before"}, where
    others = [row for row in node.parts.store.sandboxes() if row.sandbox_id != sandbox_id]
    assert all(row.state in _RESTING for row in others), where
    if row.state is before:
        await verb(node, sandbox_id)
        await node.quiesce()
        assert node.problems() == [], f"second attempt after {where}"
    task.cancel()
    await node.close()
    return reached


@pytest.mark.parametrize("name", VERBS)
async def test_a_server_killed_at_any_step_leaves_nothing_the_next_cannot_mend(ram_path: Path, name: str) -> None:
    await _kill_at_each(ram_path, name, writes_memory=False)


@pytest.mark.parametrize("name", CAPTURES)
async def test_a_server_killed_in_a_capture_loses_no_page_that_a_vmm_has_told_of(ram_path: Path, name: str) -> None:
    await _kill_at_each(ram_path, name, writes_memory=True)


async def test_a_server_with_another_driver_touches_nothing(node: FakeNode) -> None:
    sandbox_id = await node.create()
    row = node.row(sandbox_id)
    assert row.vm is not None
    here = ProcessId(os.getpid(), process.start_ticks(os.getpid()) or 0)
    of_qemu = replace(node.parts.identity, driver="qemu")
    alive = replace(row.vm, pid=here.pid, pid_start_ticks=here.start_ticks, identity=of_qemu)
    await node.parts.store.change(sandbox_id, vm=alive)
    before = node.devices.stack_ids
    node.kill_server()
    with pytest.raises(Conflict, match="runs on qemu, but this node is to run on fake") as error:
        await node.start_server()
    assert "vmm.driver to qemu" in error.value.hint
    assert node.devices.stack_ids == before
    assert len(node.processes.alive()) == 1


async def _kill_at_each(ram_path: Path, name: str, writes_memory: bool) -> None:
    for step in range(1, _STEPS_MAX):
        if not await _kill_at(ram_path / str(step), name, step, writes_memory):
            assert step > 2
            return
    pytest.fail(f"{name} has {_STEPS_MAX} steps or more: raise the limit of this test")


async def test_running_and_paused_ones_go_on_after_a_restart(node: FakeNode) -> None:
    running = [await node.create() for _ in range(5)]
    paused = [await node.create() for _ in range(5)]
    for sandbox_id in running + paused:
        assert node.process(sandbox_id).write("0", sandbox_id)
    for sandbox_id in paused:
        await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    tokens = {sandbox_id: node.row(sandbox_id).access_token for sandbox_id in running + paused}
    pids = {sandbox_id: node.process(sandbox_id).process.pid for sandbox_id in running}
    for _ in range(3):
        node.kill_server()
        await node.start_server()
    await node.quiesce()
    assert node.problems() == []
    assert {sandbox_id: node.process(sandbox_id).process.pid for sandbox_id in running} == pids, "a VM was started anew"
    for sandbox_id in running:
        await node.orchestrator.pause(sandbox_id)
    for sandbox_id in running + paused:
        await node.orchestrator.resume(sandbox_id, 600)
        assert node.content(sandbox_id) == {"booted": "yes", "0": sandbox_id}
        assert node.row(sandbox_id).access_token == tokens[sandbox_id]
    await node.quiesce()
    assert node.problems() == []


async def test_a_vm_that_died_while_the_server_was_down_is_told_as_lost(node: FakeNode) -> None:
    sandbox_id = await node.create()
    node.kill_server()
    node.processes.end(node.process(sandbox_id))
    await node.start_server()
    await node.quiesce()
    row = node.row(sandbox_id)
    assert (row.state, row.reason) == (State.KILLED, "its VM or its disk was lost while the server was down")
    assert node.problems() == []


async def test_a_vm_that_dies_while_it_is_taken_over_gives_everything_back(ram_path: Path) -> None:
    node = FakeNode(ram_path / "node", seed=1)
    await node.start_server()
    first, second = await node.create(), await node.create()
    node.kill_server()
    processes = [node.process(sandbox_id) for sandbox_id in (first, second)]
    find = node.processes.find

    def find_and_end(pid: int) -> FakeProcess | None:
        """The first dies as soon as the second is taken over."""
        if pid == processes[1].process.pid:
            node.processes.end(processes[0], "it died")
        return find(pid)

    node.processes.find = find_and_end  # type: ignore[method-assign]
    for number in range(20):  # strays to close: the network pool is opened late
        node.devices.open(f"disk-stray{number}", (), None, 4096, "direct")
    await node.start_server()
    await node.quiesce()
    assert [node.row(i).state for i in (first, second)] == [State.KILLED, State.RUNNING]
    assert node.problems() == []
    await node.close()


async def test_a_block_server_that_lost_its_stacks_takes_the_vms_with_it_but_no_snapshot(node: FakeNode) -> None:
    running, paused = await node.create(), await node.create()
    await node.orchestrator.pause(paused)
    await node.quiesce()
    node.kill_server()
    for stack_id in node.devices.opened:
        node.devices.close(stack_id, force=True)
    await node.start_server()
    await node.quiesce()
    assert (node.row(running).state, node.row(paused).state) == (State.KILLED, State.PAUSED)
    assert node.problems() == []
    await node.orchestrator.resume(paused, 600)


async def test_who_finds_a_sandbox_gone_finds_the_reason_whenever_the_server_was_killed(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I01: the end and its reason are one commit."""
    sandbox_id = await node.create()

    async def never(*_: object) -> None:
        """What a server does that is killed before."""

    monkeypatch.setattr(node.parts.store, "add_event", never)
    await node.orchestrator.kill(sandbox_id)
    assert node.row(sandbox_id).state is State.KILLED
    last = (await node.orchestrator.logs(sandbox_id, LogQuery()))[-1]
    assert (last.message, last.fields) == ("ended", {"reason": "killed by request"})


async def test_a_vm_that_the_kernel_killed_for_want_of_memory_is_said_to_be_that(node: FakeNode) -> None:
    killed, crashed = await node.create(), await node.create()
    vm = node.row(killed).vm
    assert vm is not None
    node.cgroups.oom_killed.add(life(killed, vm.run_id))
    for sandbox_id in (killed, crashed):
        node.processes.end(node.process(sandbox_id), "its VMM was killed")
    await node.quiesce()
    assert node.row(killed).reason.startswith("its VM ended by itself: the kernel killed its VMM for want of memory: ")
    assert node.row(crashed).reason == "its VM ended by itself: its VMM was killed"


async def test_a_vm_that_dies_ends_its_sandbox_with_a_reason_and_no_fresh_start(node: FakeNode) -> None:
    gone: list[str] = []
    node.orchestrator.on_gone(gone.append)
    sandbox_id = await node.create(on_timeout="pause")
    node.processes.end(node.process(sandbox_id), "kernel panic")
    await node.quiesce()
    row = node.row(sandbox_id)
    assert (row.state, row.reason) == (State.KILLED, "its VM ended by itself: kernel panic")
    assert sandbox_id in gone
    assert node.processes.alive() == []
    assert node.problems() == []


async def test_closing_lets_vms_go_on_and_ends_the_verbs_under_way(node: FakeNode) -> None:
    first = await node.create()
    with node.points.hold("vmm.restore") as reached:
        creating = asyncio.create_task(node.create())
        await reached.wait()
        closing = asyncio.create_task(node.orchestrator.close())
        for _ in range(20):
            node.clock.advance_ms(100)
            await node.turn()
        assert not closing.done()
    second = await creating
    for _ in range(20):
        node.clock.advance_ms(100)
        await node.turn()
    await closing
    assert {node.process(first).running, node.process(second).running} == {True}


async def test_a_changed_pool_of_addresses_does_not_keep_the_server_from_starting(node: FakeNode) -> None:
    """The slot of a running one is outside the new pool: it is lost, and that is said."""
    others = [await node.create() for _ in range(3)]
    node.kill_server()
    node.layout = type(node.layout)("10.119.0.0/30", node.layout.tag)
    for number in list(node.network.present):
        if number >= node.layout.count:
            node.network.present.discard(number)
    await node.start_server()
    await node.quiesce()
    assert sorted(node.row(i).state for i in others) == [State.KILLED, State.RUNNING, State.RUNNING]
    with pytest.raises(AgentEnvError):
        await node.create()


async def test_a_vm_taken_over_by_a_newer_vmm_version_keeps_its_own_identity(ram_path: Path) -> None:
    node = FakeNode(ram_path)
    await node.start_server()
    sandbox_id = await node.create()
    made_with = node.parts.identity
    node.kill_server()
    await node.start_server()
    node.parts.identity = replace(made_with, vmm_version="99.0")
    await node.orchestrator.pause(sandbox_id)
    assert node.parts.store.snapshot(node.row(sandbox_id).snapshot_id or "").identity == made_with
    with pytest.raises(SnapshotOfAnotherHost, match=r"vmm_version '.*' \(here '99.0'\)"):
        await node.orchestrator.resume(sandbox_id, 300)
    assert node.row(sandbox_id).state is State.PAUSED
    await node.close()


@pytest.mark.parametrize("reached", ["guest.initialise", None])
async def test_a_repeated_creation_is_known_if_the_first_came_to_run(ram_path: Path, reached: str | None) -> None:
    """A server that is killed before the guest answers has created nothing: the repeat creates it."""
    creation = Creation("caller:key", "fingerprint")
    node = FakeNode(ram_path / "node")
    await node.start_server()
    if reached is None:
        sandbox_id = await node.create(creation=creation)
        (child,) = await node.orchestrator.fork(sandbox_id, 1, 60)
        assert child.sandbox is not None
        assert child.sandbox.creation is None, "a child answers to its source's key"
    else:
        with node.points.hold(reached) as held:
            creating = asyncio.ensure_future(node.create(creation=creation))
            await held.wait()
            node.kill_server()
            creating.cancel()
    node.kill_server()
    await node.start_server()
    await node.quiesce()
    known = await node.orchestrator.created_by("caller:key")
    assert (known is None) == (reached is not None)
    if known is not None:
        assert (known.sandbox_id, known.creation) == (sandbox_id, creation)
        node.clock.advance_ms(3_600_000)
        assert await node.orchestrator.created_by("caller:key") is None
    assert await node.orchestrator.created_by("caller:other") is None
    await node.close()


async def test_writing_out_says_what_the_disk_said(node: FakeNode) -> None:
    await node.orchestrator.write_out()

    def broken(_folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    node.parts.write_out = broken
    with pytest.raises(Internal, match=r"it was done, but .* Input/output error"):
        await node.orchestrator.write_out()
