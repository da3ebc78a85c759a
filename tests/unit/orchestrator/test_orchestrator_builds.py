"""Builds on a whole node: their VMs are nobody's sandboxes, and nothing is left of them whatever happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from agentenv.core.builds import BuildJob, BuildPlan, MachineSize, Step
from agentenv.core.errors import AgentEnvError, NotFound
from agentenv.core.lifecycle import State
from agentenv.core.model import Page, SandboxFilter
from agentenv.testing.fake_node import FakeNode

RUN = (Step("RUN", ("first",)), Step("RUN", ("second",)))


async def begin(node: FakeNode, *steps: Step, name: str = "mine", **plan: object) -> BuildJob:
    job = await node.orchestrator.builds.request(name, (), MachineSize(memory_mb=plan.pop("memory_mb", None)))
    plan.setdefault("from_template", "base")
    return await node.orchestrator.builds.start(job.template_id, job.build_id, BuildPlan(steps=steps, **plan))


async def timed(node: FakeNode, work: Coroutine[Any, Any, None]) -> None:
    """Work that waits for the clock."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        node.clock.advance_ms(50)
    await task


async def finish(node: FakeNode, job: BuildJob) -> BuildJob:
    await timed(node, node.orchestrator.builds.settle())
    await node.quiesce()
    return node.orchestrator.builds.job(job.template_id, job.build_id)


def disk_of(node: FakeNode, template: str) -> set[str]:
    found = next(t for t in node.parts.store.templates() if template in t.aliases)
    content = node.snapshot_content(found.builds[0].snapshot_id)
    return {key for key in content if key in ("booted", "first", "second", "other")}


async def test_a_build_ends_as_a_template_that_sandboxes_start_from(node: FakeNode):
    node.guest.answers_to = lambda command: (0, "said")
    job = await finish(node, await begin(node, *RUN, Step("ENV", ("A", "1"))))
    assert (job.status, job.failure) == ("ready", None)
    assert disk_of(node, "mine") == {"booted", "first", "second"}
    assert node.problems() == []
    made = node.row(await node.create(template="mine", env_vars={"B": "2"}))
    assert (made.env_vars, made.template_name) == ({"A": "1", "B": "2"}, "mine")
    identity = node.process(made.sandbox_id).identity
    assert (identity.default_user, identity.default_workdir) == ("user", "/home/user")
    await node.quiesce()
    assert node.problems() == []


async def test_its_vm_is_nobodys_sandbox(node: FakeNode):
    with node.points.hold("guest.execute:done") as reached:
        job = await begin(node, *RUN)
        await reached.wait()
        (row,) = (row for row in node.parts.store.sandboxes() if row.state is State.RUNNING)
        assert row.purpose == "build"
        with pytest.raises(NotFound):
            await node.orchestrator.get(row.sandbox_id)
        assert node.orchestrator.peek_running() == []
        assert await node.orchestrator.search(SandboxFilter(), Page()) == ([], None)
        assert await node.orchestrator.count(SandboxFilter()) == 0
    assert (await finish(node, job)).status == "ready"


async def test_users_and_folders_reach_sandboxes_their_snapshots_and_forks(node: FakeNode):
    await finish(node, await begin(node, Step("USER", ("root",)), Step("WORKDIR", ("/app",)), start_command="serve", ready_command="ok"))
    source = await node.create(template="mine")
    snapshot, _ = await node.orchestrator.snapshot(source, "kept")
    for sandbox_id in (source, await node.create(template=snapshot.name)):
        identity = node.process(sandbox_id).identity
        assert (identity.default_user, identity.default_workdir) == ("root", "/app")
    assert snapshot.builds[0].service == next(t for t in node.parts.store.templates() if t.name == "mine").builds[0].service
    (fork,) = await node.orchestrator.fork(source, 1, 60)
    assert node.process(fork.sandbox.sandbox_id).identity.default_workdir == "/app"


async def test_cached_disks_survive_the_sweep_and_another_machine_size_boots(node: FakeNode):
    await finish(node, await begin(node, *RUN))
    node.guest.commands.clear()
    job = await finish(node, await begin(node, RUN[0], Step("RUN", ("other",))))
    assert job.status == "ready"
    assert [command for command in node.guest.commands if command in ("first", "second", "other")] == ["other"]
    assert disk_of(node, "mine") == {"booted", "first", "other"}
    job = await finish(node, await begin(node, *RUN, name="large", memory_mb=256))
    assert job.status == "ready", job.failure
    assert node.row(await node.create(template="large")).machine.memory_mb == 256
    await node.quiesce()
    assert node.problems() == []


async def test_many_steps_keep_the_chain_short(node: FakeNode):
    steps = [Step("RUN", (f"step {n}",)) for n in range(60)]
    assert (await finish(node, await begin(node, *steps))).status == "ready"
    assert (await finish(node, await begin(node, *steps[:45], Step("RUN", ("other",))))).status == "ready"
    found = next(t for t in node.parts.store.templates() if t.name == "mine").builds[0]
    done = {key for key in node.snapshot_content(found.snapshot_id) if key.startswith(("step", "other"))}
    assert done == {f"step {n}" for n in range(45)} | {"other"}
    assert max(len(snapshot.disk_layers) for snapshot in node.parts.store.snapshots()) <= 40
    assert node.problems() == []


async def test_a_server_killed_at_any_point_leaves_nothing_but_what_is_cached(ram_path):
    node = FakeNode(ram_path / "counted")
    await node.start_server()
    await finish(node, await begin(node, *RUN))
    count = len(node.points.passed)
    await node.close()
    for at in range(0, count, 7):
        node = FakeNode(ram_path / f"killed-{at}")
        await node.start_server()
        job = await begin(node, *RUN)
        for _ in range(3000):
            if len(node.points.passed) >= at:
                break
            await asyncio.sleep(0)
            node.clock.advance_ms(1)
        node.kill_server()
        await node.start_server()
        await node.quiesce()
        now = node.orchestrator.builds.job(job.template_id, job.build_id)
        assert now.status in ("ready", "error"), at
        assert now.status == "ready" or "server stopped" in now.failure.message
        assert node.problems() == [], at
        again = await finish(node, await begin(node, *RUN))
        assert again.status == "ready", (at, again.failure)
        assert disk_of(node, "mine") == {"booted", "first", "second"}
        assert node.problems() == [], at
        await node.close()


async def test_a_failure_at_any_step_ends_the_build_and_leaves_nothing(ram_path):
    node = FakeNode(ram_path / "counted")
    await node.start_server()
    await finish(node, await begin(node, *RUN))
    count = len(node.points.passed)
    await node.close()
    for at in range(1, count, 5):
        node = FakeNode(ram_path / f"failed-{at}")
        await node.start_server()
        node.points.fail("[!s]*", at=at)  # any but the store: what cannot be recorded is the next server's
        try:
            job = await begin(node, *RUN)
        except AgentEnvError:
            await node.close()
            continue
        now = await finish(node, job)
        assert now.status in ("ready", "error"), at
        node.points.clear()
        await node.quiesce()
        assert node.problems() == [], (at, node.points.failed)
        again = await finish(node, await begin(node, *RUN))
        assert again.status == "ready", (at, again.failure)
        assert disk_of(node, "mine") == {"booted", "first", "second"}
        await node.close()


async def test_a_stopped_server_ends_its_builds_first(node: FakeNode):
    with node.points.hold("guest.execute"):
        job = await begin(node, *RUN)
        await node.turn()
        await timed(node, node.orchestrator.close())
        now = node.orchestrator.builds.job(job.template_id, job.build_id)
        assert (now.status, "server was stopped" in now.failure.message) == ("error", True)
    assert node.processes.alive() == []


async def test_what_was_recorded_can_be_read_again(node: FakeNode):
    await finish(node, await begin(node, *RUN, start_command="serve", ready_command="ok"))
    build = next(t for t in node.parts.store.templates() if t.name == "mine").builds[0]
    node.kill_server()
    await node.start_server()
    assert next(t for t in node.parts.store.templates() if t.name == "mine").builds[0] == build
    assert len(node.parts.store.cached_steps.all()) == 3
    assert json.dumps([entry.key for entry in node.parts.store.cached_steps.all()])
