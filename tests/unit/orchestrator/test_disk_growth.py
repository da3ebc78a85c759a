"""A sandbox may have a larger disk than its template: it has it before anybody sees it, and keeps it through its life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.config.limits import LimitsConfig
from agentenv.core.builds import BuildPlan, MachineSize, Step
from agentenv.core.errors import InvalidInput, Unavailable
from agentenv.core.lifecycle import State
from agentenv.core.model import CreateRequest
from agentenv.testing.fake_node import FakeNode

MIB = 1 << 20
TEMPLATE_MB, ASKED_MB, MOST_MB = 64, 1536, 2048  # the fake node's template has 64
LIMITS = LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=0, disk_mb_of_sandbox=MOST_MB)


@pytest.fixture
async def roomy(ram_path: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode(ram_path / "node", limits=LIMITS)
    await node.start_server()
    yield node
    await node.close()


def device_bytes(node: FakeNode, sandbox_id: str) -> int:
    return node.devices.at(node.process(sandbox_id).spec.disk).virtual_size_bytes


def require(node: FakeNode, sandbox_id: str, *, is_grown_now: bool) -> None:
    assert node.row(sandbox_id).machine.disk_mb == ASKED_MB
    assert node.process(sandbox_id).spec.machine.disk_mb == ASKED_MB
    assert device_bytes(node, sandbox_id) == ASKED_MB * MIB
    assert node.process(sandbox_id).file_system_bytes == (ASKED_MB * MIB if is_grown_now else 0)


async def test_it_follows_a_sandbox_through_pause_fork_rollback_template_and_restart(roomy: FakeNode) -> None:
    node = roomy
    sandbox_id = await node.create(disk_mb=ASKED_MB)
    require(node, sandbox_id, is_grown_now=True)
    await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.connect(sandbox_id, 60)
    require(node, sandbox_id, is_grown_now=False)
    await node.orchestrator.pause(sandbox_id, False)
    await node.orchestrator.connect(sandbox_id, 60)
    require(node, sandbox_id, is_grown_now=False)
    (child,) = await node.orchestrator.fork(sandbox_id, 1, 60)
    assert child.sandbox is not None
    require(node, child.sandbox.sandbox_id, is_grown_now=False)
    await node.orchestrator.checkpoint(sandbox_id, "here")
    await node.orchestrator.rollback(sandbox_id)
    require(node, sandbox_id, is_grown_now=False)
    await node.orchestrator.snapshot(sandbox_id, "large")
    require(node, await node.create(template="large"), is_grown_now=False)
    with pytest.raises(InvalidInput, match=f"less than the {ASKED_MB} of template large"):
        await node.create(template="large", disk_mb=ASKED_MB - 1)
    await node.quiesce()
    node.kill_server()
    await node.start_server()
    require(node, sandbox_id, is_grown_now=False)
    await node.quiesce()
    assert node.problems() == []


@pytest.mark.parametrize("writes_memory", [False, True])
async def test_without_asking_it_is_the_templates(ram_path: Path, writes_memory: bool) -> None:
    node = FakeNode(ram_path / "node", writes_memory=writes_memory)
    await node.start_server()
    sandbox_id = await node.create()
    assert node.row(sandbox_id).machine.disk_mb == TEMPLATE_MB
    same = await node.create(disk_mb=TEMPLATE_MB)
    assert [node.process(one).file_system_bytes for one in (sandbox_id, same)] == [0, 0]
    await node.close()


@pytest.mark.parametrize("disk_mb", [TEMPLATE_MB - 1, MOST_MB + 1])
async def test_what_cannot_be_is_refused_before_anything_is_made(roomy: FakeNode, disk_mb: int) -> None:
    with pytest.raises(InvalidInput, match="diskSizeMB: "):
        await roomy.create(disk_mb=disk_mb)
    with pytest.raises(InvalidInput, match="diskSizeMB: "):
        await roomy.orchestrator.create_many([CreateRequest("base"), CreateRequest("base", disk_mb=disk_mb)])
    assert roomy.parts.store.sandboxes() == []


@pytest.mark.parametrize("point", ["vm.disk_grown", "guest.grow_disk", "guest.grow_disk:done"])
async def test_a_vmm_that_dies_meanwhile_leaves_nothing_and_the_call_may_be_repeated(roomy: FakeNode, point: str) -> None:
    node = roomy
    with node.points.hold(point) as reached:
        creating = asyncio.create_task(node.create(disk_mb=ASKED_MB))
        await asyncio.wait_for(reached.wait(), 5)
        (process,) = node.processes.alive()
        node.processes.end(process, "killed")
        await node.turn()
    with pytest.raises(Unavailable, match=r"lost while starting|is gone"):
        await creating
    assert [sandbox.state for sandbox in node.parts.store.sandboxes()] == [State.KILLED]
    await node.quiesce()
    assert node.problems() == []
    require(node, await node.create(disk_mb=ASKED_MB), is_grown_now=True)


async def test_a_build_makes_a_template_with_a_larger_disk(roomy: FakeNode) -> None:
    node = roomy
    builds = node.orchestrator.builds
    job = await builds.request("large", (), MachineSize(disk_mb=ASKED_MB))
    await builds.start(job.template_id, job.build_id, BuildPlan(from_template="base", steps=(Step("RUN", ("first",)),)))
    settled = asyncio.ensure_future(builds.settle())
    while not settled.done():
        await asyncio.sleep(0)
        node.clock.advance_ms(50)
    assert builds.job(job.template_id, job.build_id).failure is None
    (template,) = [t for t in node.parts.store.templates() if "large" in t.aliases]
    assert template.builds[0].machine.disk_mb == ASKED_MB
    require(node, await node.create(template="large"), is_grown_now=False)
    await node.quiesce()
    assert node.problems() == []
