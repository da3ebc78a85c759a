"""Races that were possible once, each held open at the one point where it matters."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.config.schema import VmmConfig
from agentenv.core.errors import NotFound, StorageFull
from agentenv.core.lifecycle import State
from agentenv.orchestrator.sweep import sweep
from agentenv.snapshot.layers import LayerStore
from agentenv.testing.fake_node import FakeNode


async def test_a_kill_during_a_create_waits_and_leaves_nothing(node: FakeNode) -> None:
    with node.points.hold("store.commit") as reached:
        creating = asyncio.create_task(node.create())
        await reached.wait()
        [row] = node.parts.store.sandboxes()
        killing = asyncio.create_task(node.orchestrator.kill(row.sandbox_id))
        await node.turn()
        assert not killing.done()
    await asyncio.gather(creating, killing)
    await node.quiesce()
    assert node.row(row.sandbox_id).state is State.KILLED
    assert node.problems() == []


async def test_a_slot_is_never_given_back_twice(node: FakeNode) -> None:
    """The last commit of a kill fails; while the kill is repaired, the slot is another sandbox's already."""
    first = await node.create()
    node.points.fail("store.commit", at=2, error=StorageFull("full"))
    with pytest.raises(StorageFull):
        await node.orchestrator.kill(first)
    await node.parts.slots.settle()
    second = await node.create()
    assert node.row(second).vm is not None
    await node.quiesce()
    assert node.row(first).state is State.KILLED
    assert node.problems() == []


async def test_a_second_kill_finishes_what_the_first_could_not(node: FakeNode) -> None:
    sandbox_id = await node.create()
    node.points.fail("store.commit", at=2, error=StorageFull("full"))
    with pytest.raises(StorageFull):
        await node.orchestrator.kill(sandbox_id)
    await node.orchestrator.kill(sandbox_id)
    with pytest.raises(NotFound):
        await node.orchestrator.kill(sandbox_id)


async def test_the_sweep_does_not_close_memory_that_a_resume_is_opening(node: FakeNode) -> None:
    node.parts.config = node.config.model_copy(update={"vmm": VmmConfig(own_memory_copied_mb=0)})  # it has a device of its own
    sandbox_id = await node.create()
    await node.orchestrator.pause(sandbox_id)
    node.points.fail("vmm.restore", error=StorageFull("full"))
    with pytest.raises(StorageFull):
        await node.orchestrator.resume(sandbox_id, 600)
    await node.turn()  # its memory is open still, and nobody names it
    with node.points.hold("blocks.close") as reached:
        sweeping = asyncio.create_task(sweep(node.parts))
        await reached.wait()
        resuming = asyncio.create_task(node.orchestrator.resume(sandbox_id, 600))
        await node.turn()
    await asyncio.gather(sweeping, resuming)
    await node.quiesce()
    assert node.row(sandbox_id).state is State.RUNNING
    assert node.problems() == []


class _SlowLayers(LayerStore):
    """Whose listing comes late, after `meanwhile` has run on the loop."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.loop = asyncio.get_running_loop()
        self.meanwhile = self._nothing

    async def _nothing(self) -> None: ...

    def files(self) -> list[Path]:
        asyncio.run_coroutine_threadsafe(self.meanwhile(), self.loop).result(5.0)
        return super().files()


async def test_the_sweep_does_not_delete_a_layer_that_was_made_while_it_waited(node: FakeNode) -> None:
    """Its work on files waits for a busy thread pool; a sandbox starts meanwhile."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    sandbox_id = await node.create()
    layers = node.parts.layers = _SlowLayers(node.paths.layers)
    new = layers.new_id()

    async def start_something() -> None:
        vm = node.row(sandbox_id).vm
        assert vm is not None
        await node.parts.store.change(sandbox_id, vm=replace(vm, upper_layer=new))
        layers.path(new).write_text("{}")

    layers.meanwhile = start_something
    await sweep(node.parts)
    assert layers.path(new).exists()


async def test_a_failed_record_after_a_seal_loses_no_write(node: FakeNode) -> None:
    """The disk goes on with a fresh upper that the record does not name; a sweep comes, and then two more pauses."""
    sandbox_id = await node.create()
    expected = {"booted": "yes"}
    for step, point in enumerate(("blocks.seal:done", "store.commit", "blocks.seal:done")):
        assert node.process(sandbox_id).write(str(step), "x")
        expected[str(step)] = "x"
        node.points.fail(point, at=2 if point == "store.commit" else 1, error=StorageFull("full"))
        with pytest.raises(StorageFull):
            await node.orchestrator.pause(sandbox_id)
        await sweep(node.parts)
    assert node.process(sandbox_id).write("last", "x")
    await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    assert node.content(sandbox_id) == expected | {"last": "x"}
    assert node.problems() == []


async def test_cancelled_callers_leave_the_verb_to_its_end(node: FakeNode) -> None:
    sandbox_id = await node.create()
    for verb, state in ((node.orchestrator.pause(sandbox_id), State.PAUSED), (node.orchestrator.resume(sandbox_id, 60), State.RUNNING)):
        task = asyncio.create_task(verb)
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await node.quiesce()
        assert node.row(sandbox_id).state is state
    assert node.problems() == []


async def test_concurrent_connects_start_one_vm(node: FakeNode) -> None:
    sandbox_id = await node.create()
    await node.orchestrator.pause(sandbox_id)
    results = await asyncio.gather(*(node.orchestrator.connect(sandbox_id, 60 + i) for i in range(20)))
    assert sum(resumed for _, resumed in results) == 1
    assert node.row(sandbox_id).end_at_ms == node.clock.now_ms() + 79_000
    assert node.points.passed.count("vmm.restore") == 2
    await node.quiesce()
    assert node.problems() == []


async def test_children_start_from_layers_that_are_merged_away_meanwhile(node: FakeNode) -> None:
    limits = node.config.limits.model_copy(update={"layers_in_chain": 1})
    node.parts.config = node.config.model_copy(update={"limits": limits})
    sandbox_id = await node.create()
    assert node.process(sandbox_id).write("0", "x")
    await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.resume(sandbox_id, 600)
    with node.points.hold("slots.acquire") as acquiring:
        with node.points.hold("blocks.commit") as merging:
            await node.orchestrator.pause(sandbox_id)
            await merging.wait()
            forking = asyncio.create_task(node.orchestrator.fork(sandbox_id, 2, 600))
            await acquiring.wait()
        await node.turn()
        assert len(node.parts.store.snapshot(node.row(sandbox_id).snapshot_id or "").disk_layers) == 2, "they were not merged"
        await sweep(node.parts)
    outcomes = await forking
    assert [outcome.error_message for outcome in outcomes] == ["", ""]
    await node.quiesce()
    assert node.problems() == []


@pytest.mark.parametrize("copied_mb", [0, 16])
async def test_a_sandbox_that_is_paused_all_day_loses_nothing_and_keeps_short_chains(node: FakeNode, copied_mb: int) -> None:
    limits = node.config.limits.model_copy(update={"layers_in_chain": 4})
    changed = {"limits": limits, "vmm": VmmConfig(own_memory_copied_mb=copied_mb)}
    node.parts.config = node.config.model_copy(update=changed)
    sandbox_id, expected = await node.create(), {"booted": "yes"}
    for cycle in range(30):
        block, value = str(cycle % 7), f"cycle {cycle}"
        assert node.process(sandbox_id).write(block, value)
        expected[block] = value
        await node.orchestrator.pause(sandbox_id)
        if cycle % 3 == 0:
            await node.quiesce()
        if cycle % 5 == 4:
            node.kill_server()
            await node.start_server()
            node.parts.config = node.config.model_copy(update=changed)
        await node.orchestrator.resume(sandbox_id, 600)
        assert node.content(sandbox_id) == expected, f"after cycle {cycle}"
    await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    assert node.problems() == []
    snapshot = node.parts.store.snapshot(node.row(sandbox_id).snapshot_id or "")
    assert max(len(snapshot.memory_layers), len(snapshot.disk_layers)) <= 6
