"""The orchestrator in memory keeps the rules it stands for."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.core.errors import Conflict, Internal, LimitReached, NotFound, Unavailable
from agentenv.core.lifecycle import State
from agentenv.core.model import CreateRequest, Page, SandboxFilter
from agentenv.orchestrator.protocol import Orchestrator
from agentenv.testing.fake_orchestrator import FakeOrchestrator, ManualClock, make_template


@pytest.fixture
def fake(clock: ManualClock) -> FakeOrchestrator:
    return FakeOrchestrator(clock, sandboxes_running=3)


async def _call(fake: FakeOrchestrator, verb: str, sandbox_id: str) -> None:
    match verb:
        case "pause":
            await fake.pause(sandbox_id)
        case "resume":
            await fake.resume(sandbox_id, 9)
        case "fork":
            await fake.fork(sandbox_id, 1, 9)
        case _:
            raise ValueError(verb)


async def test_it_is_an_orchestrator(fake: FakeOrchestrator):
    protocol: Orchestrator = fake
    assert (await protocol.create(CreateRequest("base"))).state is State.RUNNING


async def test_illegal_moves_are_refused(fake: FakeOrchestrator):
    sandbox = await fake.create(CreateRequest("base"))
    with pytest.raises(Internal, match="lifecycle table"):
        fake._move(sandbox.sandbox_id, State.RESUMING)


async def test_the_limit_counts_what_runs(fake: FakeOrchestrator):
    first, second, _ = [await fake.create(CreateRequest("base")) for _ in range(3)]
    with pytest.raises(LimitReached):
        await fake.create(CreateRequest("base"))
    await fake.pause(first.sandbox_id)
    await fake.create(CreateRequest("base"))
    with pytest.raises(LimitReached):
        await fake.resume(first.sandbox_id, 10)
    await fake.kill(second.sandbox_id)
    assert (await fake.resume(first.sandbox_id, 10)).state is State.RUNNING


async def test_a_fork_beyond_the_limit_fails_child_by_child(fake: FakeOrchestrator):
    sandbox = await fake.create(CreateRequest("base"))
    outcomes = await fake.fork(sandbox.sandbox_id, 4, 10)
    assert [outcome.error_status for outcome in outcomes] == [0, 0, 429, 429]


@pytest.mark.parametrize(("verb", "state"), [("pause", State.RUNNING), ("resume", State.PAUSED), ("fork", State.RUNNING)])
@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_failed_or_cancelled_verb_is_undone(verb: str, state: State, cancelled: bool, fake: FakeOrchestrator):
    sandbox_id = (await fake.create(CreateRequest("base"))).sandbox_id
    if verb == "resume":
        await fake.pause(sandbox_id)
    if cancelled:
        with fake.hold(verb) as arrived:
            task = asyncio.create_task(_call(fake, verb, sandbox_id))
            await asyncio.wait_for(arrived.wait(), 5)
            assert fake.peek(sandbox_id).state is not state
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    else:
        fake.fail_next(verb, Unavailable("no"))
        with pytest.raises(Unavailable):
            await _call(fake, verb, sandbox_id)
    assert fake.peek(sandbox_id).state is state


async def test_a_failed_create_leaves_nothing(fake: FakeOrchestrator):
    fake.fail_next("create", Unavailable("no"))
    with pytest.raises(Unavailable):
        await fake.create(CreateRequest("base"))
    assert await fake.search(SandboxFilter(), Page()) == ([], None)
    for _ in range(3):
        await fake.create(CreateRequest("base"))


@pytest.mark.parametrize("verb", ["pause", "resume", "fork"])
async def test_kill_wins_over_a_verb_under_way(verb: str, fake: FakeOrchestrator):
    sandbox_id = (await fake.create(CreateRequest("base"))).sandbox_id
    if verb == "resume":
        await fake.pause(sandbox_id)
    with fake.hold(verb) as arrived:
        task = asyncio.create_task(_call(fake, verb, sandbox_id))
        await asyncio.wait_for(arrived.wait(), 5)
        await fake.kill(sandbox_id)
    with pytest.raises(NotFound):
        await task
    assert fake.peek(sandbox_id).state is State.KILLED
    assert await fake.search(SandboxFilter(), Page()) == ([], None)


async def test_one_verb_at_a_time(fake: FakeOrchestrator):
    sandbox_id = (await fake.create(CreateRequest("base"))).sandbox_id
    results = await asyncio.gather(fake.pause(sandbox_id), fake.pause(sandbox_id), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), Conflict]


async def test_concurrent_connects_resume_once(fake: FakeOrchestrator):
    sandbox_id = (await fake.create(CreateRequest("base"))).sandbox_id
    await fake.pause(sandbox_id)
    results = await asyncio.gather(*(fake.connect(sandbox_id, 10) for _ in range(5)))
    assert sorted(resumed for _, resumed in results) == [False] * 4 + [True]


async def test_what_is_paused_does_not_expire(fake: FakeOrchestrator, clock: ManualClock):
    sandbox_id = (await fake.create(CreateRequest("base", timeout_s=1))).sandbox_id
    await fake.pause(sandbox_id)
    clock.advance_ms(10_000_000)
    assert (await fake.get(sandbox_id)).state is State.PAUSED


async def test_the_life_starts_when_it_is_usable(fake: FakeOrchestrator, clock: ManualClock):
    with fake.hold("create") as arrived:
        task = asyncio.create_task(fake.create(CreateRequest("base", timeout_s=10)))
        await asyncio.wait_for(arrived.wait(), 5)
        clock.advance_ms(30_000)
    sandbox = await task
    assert sandbox.started_at_ms == clock.now_ms()
    assert sandbox.end_at_ms == clock.now_ms() + 10_000


async def test_templates_by_id_name_and_tag(clock: ManualClock):
    template = make_template("mine")
    fake = FakeOrchestrator(clock, [template])
    for reference in (template.template_id, "mine", "mine:default"):
        assert await fake.template(reference) == template
    for reference in ("base", "mine:other"):
        with pytest.raises(NotFound):
            await fake.template(reference)


async def test_sleepers_wake_when_the_clock_passes(clock: ManualClock):
    sleeper = asyncio.create_task(clock.sleep_ms(100))
    await asyncio.sleep(0)
    clock.advance_ms(99)
    await asyncio.sleep(0)
    assert not sleeper.done()
    clock.advance_ms(1)
    await asyncio.wait_for(sleeper, 1)
