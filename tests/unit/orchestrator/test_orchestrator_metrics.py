"""The sampler: every running guest is read in time, whatever the others do, and none when it should be left alone."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from agentenv.config.schema import LimitsConfig
from agentenv.core.errors import Internal, NotFound
from agentenv.core.lifecycle import State
from agentenv.orchestrator.sample import INTERVAL_MS, SETTLE_MS, interval_ms
from agentenv.testing.fake_node import FakeNode

_STEP_MS = 250
FIRST_MS = SETTLE_MS + 2_000


async def pass_time(node: FakeNode, duration_ms: int) -> None:
    for _ in range(duration_ms // _STEP_MS):
        node.clock.advance_ms(_STEP_MS)
        await node.turn()


async def times(node: FakeNode, sandbox_id: str) -> list[int]:
    return [sample.timestamp_ms for sample in await node.orchestrator.metrics(sandbox_id, 0, None)]


async def test_the_first_sample_comes_after_the_first_command_and_the_others_every_five_seconds(node: FakeNode) -> None:
    started_at_ms = node.clock.now_ms()
    sandbox_id = await node.create()
    await pass_time(node, FIRST_MS)
    assert len(await times(node, sandbox_id)) == 1
    await pass_time(node, 60_000)
    found = await times(node, sandbox_id)
    assert found[0] - started_at_ms <= FIRST_MS
    assert 12 <= len(found) <= 13
    assert {later - earlier for earlier, later in pairwise(found)} <= {5_000, 5_000 + _STEP_MS, 6_000}  # 6: a keeper held the lock


async def test_figures_are_the_guests_and_the_time_is_the_hosts(node: FakeNode) -> None:
    sandbox_id = await node.create()
    node.process(sandbox_id).cpu_used_percent = 37.25
    await pass_time(node, FIRST_MS)
    [sample] = await node.orchestrator.metrics(sandbox_id, 0, None)
    assert (sample.cpu_count, sample.cpu_used_percent) == (1, 37.25)
    assert (sample.memory_total_bytes, sample.disk_total_bytes) == (16 << 20, 64 << 20)
    assert node.row(sandbox_id).started_at_ms <= sample.timestamp_ms <= node.clock.now_ms()
    assert await node.orchestrator.latest_metrics([sandbox_id, "inothing"]) == {sandbox_id: sample}


async def test_ranges(node: FakeNode) -> None:
    sandbox_id = await node.create()
    await pass_time(node, 20_000)
    created_at_ms = node.row(sandbox_id).started_at_ms
    assert await node.orchestrator.metrics(sandbox_id, 0, created_at_ms - 1) == []
    every = await times(node, sandbox_id)
    assert [s.timestamp_ms for s in await node.orchestrator.metrics(sandbox_id, every[1], every[2])] == every[1:3]


async def test_a_hundred_deaf_guests_do_not_delay_the_others(ram_path: Path) -> None:
    limits = LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=0, starts_at_once=256)
    node = FakeNode(ram_path / "node", limits=limits, pool_cidr="10.119.0.0/22")
    await node.start_server()
    deaf = [await node.create() for _ in range(100)]
    for sandbox_id in deaf:
        node.process(sandbox_id).deaf = True
    await pass_time(node, 60_000)  # by then it is known that they are deaf
    healthy = [await node.create() for _ in range(10)]
    await pass_time(node, 31_000)
    for sandbox_id in healthy:
        found = await times(node, sandbox_id)
        assert len(found) >= 6
        assert max(later - earlier for earlier, later in pairwise(found)) <= 6_000
    assert [await times(node, sandbox_id) for sandbox_id in deaf] == [[]] * 100
    await node.close()


async def test_one_deaf_guest_delays_nobody_from_its_first_moment(node: FakeNode) -> None:
    deaf, healthy = await node.create(), await node.create()
    node.process(deaf).deaf = True
    await pass_time(node, FIRST_MS)
    assert len(await times(node, healthy)) == 1


async def test_a_guest_that_fails_is_asked_less_and_less_and_found_again(node: FakeNode) -> None:
    sandbox_id = await node.create()
    process = node.process(sandbox_id)
    process.metrics_error = Internal("the guest answered /metrics with 500")
    await pass_time(node, 600_000)
    assert 9 <= process.metrics_asked <= 15, "5 + 10 + 20 + 40 seconds, then one a minute"
    process.metrics_error = None
    await pass_time(node, 62_000)
    before = len(await times(node, sandbox_id))
    assert before >= 1
    await pass_time(node, 30_000)
    assert len(await times(node, sandbox_id)) >= before + 5


@pytest.mark.parametrize(("failures", "expected_ms"), [(0, 5_000), (1, 5_000), (2, 10_000), (5, 60_000), (10**6, 60_000)])
def test_the_interval_after_failures(failures: int, expected_ms: int) -> None:
    assert interval_ms(failures) == expected_ms


async def test_a_fault_of_ours_ends_neither_the_loop_nor_the_server(node: FakeNode, caplog: pytest.LogCaptureFixture) -> None:
    broken, healthy = await node.create(), await node.create()
    node.process(broken).metrics_error = ZeroDivisionError("a fault of ours")
    await pass_time(node, 21_000)
    assert "a fault of ours" in caplog.text
    assert len(await times(node, healthy)) >= 4
    node.process(broken).metrics_error = None
    await pass_time(node, 61_000)
    assert await times(node, broken)


async def test_a_pause_ends_the_reading_at_once_and_keeps_the_samples(node: FakeNode) -> None:
    sandbox_id = await node.create()
    await pass_time(node, 11_000)
    before = await times(node, sandbox_id)
    assert len(before) >= 2
    node.process(sandbox_id).deaf = True
    await pass_time(node, 6_000)  # a reading is under way
    process = node.process(sandbox_id)
    with node.points.hold("vm.pause") as reached:
        pausing = asyncio.create_task(node.orchestrator.pause(sandbox_id))
        await reached.wait()
        await node.turn()
        assert node.guest.connected == set(), "the guest was captured with a connection to us"
    await pausing
    asked = process.metrics_asked
    await pass_time(node, 60_000)
    assert process.metrics_asked == asked
    assert await times(node, sandbox_id) == before
    await node.orchestrator.resume(sandbox_id, 600)
    await pass_time(node, FIRST_MS)
    after = await times(node, sandbox_id)
    assert after[:-1] == before
    assert after[-1] > before[-1] + 60_000
    await node.quiesce()
    assert node.problems() == []


async def test_a_pause_that_fails_is_read_on(node: FakeNode) -> None:
    sandbox_id = await node.create()
    await pass_time(node, FIRST_MS)
    node.points.fail("blocks.capture")
    with pytest.raises(Internal):
        await node.orchestrator.pause(sandbox_id)
    await pass_time(node, FIRST_MS)
    assert len(await times(node, sandbox_id)) == 2


@pytest.mark.parametrize("verb", ["some verb", "fork"])
async def test_nothing_is_read_while_a_verb_holds_the_sandbox(node: FakeNode, verb: str) -> None:
    sandbox_id = await node.create()
    await pass_time(node, FIRST_MS)
    process = node.process(sandbox_id)
    asked = process.metrics_asked
    if verb == "fork":
        with node.points.hold("vm.save_state") as reached:
            forking = asyncio.create_task(node.orchestrator.fork(sandbox_id, 1, 600))
            await reached.wait()
            await pass_time(node, 20_000)
            assert process.metrics_asked == asked
        [outcome] = await forking
        assert outcome.sandbox is not None
        assert await times(node, outcome.sandbox.sandbox_id) == [], "a child does not inherit the past of its source"
    else:
        async with node.parts.shared.locked(sandbox_id):
            await pass_time(node, 20_000)
            assert process.metrics_asked == asked
    await pass_time(node, 2_000)
    assert process.metrics_asked == asked + 1


async def test_no_verb_waits_for_a_reading(node: FakeNode) -> None:
    sandbox_id = await node.create()
    node.process(sandbox_id).deaf = True
    await pass_time(node, FIRST_MS)
    assert node.process(sandbox_id).metrics_asked == 1
    await asyncio.wait_for(node.orchestrator.fork(sandbox_id, 1, 600), 5)  # the node's clock stands still
    await asyncio.wait_for(node.orchestrator.kill(sandbox_id), 5)
    await node.quiesce()
    assert node.problems() == []


async def test_a_killed_one_keeps_its_samples_until_its_row_is_forgotten(node: FakeNode) -> None:
    sandbox_id = await node.create()
    await pass_time(node, FIRST_MS)
    await node.orchestrator.kill(sandbox_id)
    await node.quiesce()
    assert node.guest.connected == set()
    assert len(await times(node, sandbox_id)) == 1
    node.clock.advance_ms(3_600_001)
    await node.quiesce()
    assert node.parts.shared.metrics == {}
    with pytest.raises(NotFound):
        await node.orchestrator.metrics(sandbox_id, 0, None)
    with pytest.raises(NotFound):
        await node.orchestrator.metrics("inothing", 0, None)


async def test_a_vm_that_dies_under_a_reading(node: FakeNode) -> None:
    sandbox_id = await node.create()
    node.process(sandbox_id).deaf = True
    await pass_time(node, FIRST_MS)
    node.processes.end(node.process(sandbox_id))
    await node.quiesce()
    assert node.row(sandbox_id).state is State.KILLED
    assert node.problems() == []


async def test_the_next_server_begins_anew(node: FakeNode) -> None:
    sandbox_id = await node.create()
    await pass_time(node, 11_000)
    node.kill_server()
    await node.start_server()
    assert await times(node, sandbox_id) == []
    await pass_time(node, FIRST_MS)
    assert len(await times(node, sandbox_id)) == 1


async def test_the_token_of_the_sandbox_opens_its_metrics(node: FakeNode) -> None:
    source = await node.create()
    [outcome] = await node.orchestrator.fork(source, 1, 600)
    assert outcome.sandbox is not None
    await pass_time(node, INTERVAL_MS)
    assert set(await node.orchestrator.latest_metrics([source, outcome.sandbox.sandbox_id])) == {source, outcome.sandbox.sandbox_id}


async def test_closing_the_server_ends_the_followers(node: FakeNode) -> None:
    deaf, healthy = await node.create(), await node.create()
    node.process(deaf).deaf = True
    await pass_time(node, FIRST_MS)
    assert len(node.guest.connected) == 2
    await asyncio.wait_for(node.orchestrator.close(), 5)
    assert node.guest.connected == set()
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("sample ")] == []
    assert node.row(healthy).state is State.RUNNING
