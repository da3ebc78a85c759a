"""A template's service after a boot: started again with the sandbox's own token, watched until it answers, and never in the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv.core.errors import AgentEnvError, DeadlineExceeded, Internal
from agentenv.core.lifecycle import State
from agentenv.core.model import LogQuery, Service
from agentenv.testing.fake_node import TEMPLATE, FakeNode

SERVICE = Service("start it", "is it ready")
DEADLINE_S = 900


async def serving(node: FakeNode, **fields: object) -> str:
    """A sandbox of a template with a service."""

    def with_service(present):  # type: ignore[no-untyped-def]
        (template,) = [template for template in present if template.name == TEMPLATE]
        return replace(template, builds=tuple(replace(build, service=SERVICE) for build in template.builds))

    await node.parts.store.change_templates(with_service)
    return await node.create(**fields)  # type: ignore[arg-type]


async def said(node: FakeNode, sandbox_id: str, part: str) -> list[str]:
    entries = await node.orchestrator.logs(sandbox_id, LogQuery(search=part))
    return [f"{entry.level}: {entry.fields.get('cause', '')}" for entry in entries]


@pytest.mark.parametrize("secure", [True, False])
async def test_a_boot_starts_the_service_and_waits_beside_the_sandbox(node: FakeNode, secure: bool) -> None:
    sandbox_id = await serving(node, secure=secure)
    assert node.guest.commands == []  # it is part of the memory
    tries = iter([(7, "not yet"), (7, "not yet"), (0, "")])
    node.guest.answers_to = lambda command: next(tries) if command == SERVICE.ready else (0, "")
    await node.orchestrator.pause(sandbox_id, memory=False)
    await node.orchestrator.connect(sandbox_id, 3600)
    assert node.guest.commands[0] == SERVICE.start
    assert await said(node, sandbox_id, "ready again") == []
    for _ in range(3):
        await node.turn()
        node.clock.advance_ms(2_000)
    await node.turn()
    assert node.guest.commands == [SERVICE.start, *[SERVICE.ready] * 3]
    assert await said(node, sandbox_id, "ready again") == ["info: "]


@pytest.mark.parametrize(
    ("paused_with", "asked_for", "boots"), [(True, True, False), (True, False, True), (False, True, True), (False, False, True)]
)
async def test_only_a_boot_does(node: FakeNode, paused_with: bool, asked_for: bool, boots: bool) -> None:
    sandbox_id = await serving(node)
    await node.orchestrator.pause(sandbox_id, memory=paused_with)
    await node.orchestrator.connect(sandbox_id, 3600, memory=asked_for)
    assert (SERVICE.start in node.guest.commands) == boots


@pytest.mark.parametrize("memory", [True, False])
async def test_forks_and_snapshots_have_the_service_of_their_source(node: FakeNode, memory: bool) -> None:
    sandbox_id = await serving(node)
    await node.orchestrator.snapshot(sandbox_id, "mine", memory=memory)
    made = await node.create(template="mine")
    assert node.guest.commands.count(SERVICE.start) == (0 if memory else 1)
    await node.orchestrator.pause(made, memory=False)
    before = node.guest.commands.count(SERVICE.start)
    outcomes = await node.orchestrator.fork(made, 2, 600)
    assert [outcome.error_message for outcome in outcomes] == ["", ""]
    assert node.guest.commands.count(SERVICE.start) == before + 2


@pytest.mark.parametrize(("answer", "cause"), [((3, "no such file"), "status 3: no such file"), (None, "did not end")])
async def test_a_start_command_that_fails_is_told_and_the_sandbox_runs(node: FakeNode, answer: tuple[int, str] | None, cause: str) -> None:
    def answers(command: str) -> tuple[int, str]:
        if answer is None:
            raise DeadlineExceeded("`start it` did not end in the guest within 30 s")
        return answer

    sandbox_id = await serving(node)
    await node.orchestrator.pause(sandbox_id, memory=False)
    node.guest.answers_to = answers
    sandbox, _ = await node.orchestrator.connect(sandbox_id, 3600)
    assert sandbox.state is State.RUNNING
    assert node.guest.commands == [SERVICE.start]
    (line,) = await said(node, sandbox_id, "start command failed")
    assert line.startswith("error: ")
    assert cause in line


@pytest.mark.parametrize("error", [None, Internal("the guest was lost")])
async def test_a_service_that_never_answers_is_given_up_in_the_end(node: FakeNode, error: AgentEnvError | None) -> None:
    def answers(command: str) -> tuple[int, str]:
        if command == SERVICE.ready and error is not None:
            raise error
        return (0, "") if command == SERVICE.start else (7, "refused")

    sandbox_id = await serving(node, timeout_s=7200)
    await node.orchestrator.pause(sandbox_id, memory=False)
    node.guest.answers_to = answers
    await node.orchestrator.connect(sandbox_id, 7200)
    for _ in range(4):
        await node.turn()
        node.clock.advance_ms(1000 * DEADLINE_S // 2)
    await node.turn()
    (line,) = await said(node, sandbox_id, f"not ready within {DEADLINE_S} s")
    assert ("the guest was lost" if error else "refused") in line
    asked = len(node.guest.commands)
    node.clock.advance_ms(1000 * DEADLINE_S)
    await node.turn()
    assert len(node.guest.commands) == asked


@pytest.mark.parametrize("verb", ["pause", "kill"])
async def test_nobody_asks_a_guest_that_is_gone(node: FakeNode, verb: str) -> None:
    """Its network may be another sandbox's by then."""
    sandbox_id = await serving(node)
    await node.orchestrator.pause(sandbox_id, memory=False)
    node.guest.answers_to = lambda command: (7, "not yet") if command == SERVICE.ready else (0, "")
    await node.orchestrator.connect(sandbox_id, 3600)
    await node.turn()
    await getattr(node.orchestrator, verb)(sandbox_id)
    asked = len(node.guest.commands)
    await node.create()
    node.clock.advance_ms(10_000)
    await node.turn()
    assert len(node.guest.commands) == asked
    await node.quiesce()
    assert node.problems() == []
