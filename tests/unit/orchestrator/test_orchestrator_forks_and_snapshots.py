"""Forks and snapshots leave no entries of their own behind, and a caller that goes away leaves only what is listed (cases D11, D14)."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from agentenv.core.lifecycle import State
from agentenv.core.model import Page, SandboxFilter
from agentenv.orchestrator.templates import all_builds
from agentenv.testing.fake_node import FakeNode

_MANY = 50


def _entries(node: FakeNode) -> dict[str, int]:
    store = node.parts.store
    return {
        "templates": len(store.templates()),
        "builds": len(list(all_builds(store))),
        "snapshots": len(store.snapshots()),
        "folders": len(list(node.paths.snapshots.iterdir())),
        "layers": len({node.parts.layers.id_of(path) for path in node.parts.layers.files()}),
    }


@pytest.mark.parametrize("restarts", [False, True])
async def test_what_was_deleted_is_in_no_list(node: FakeNode, restarts: bool) -> None:
    source = await node.create()
    await node.orchestrator.pause(source)
    await node.quiesce()
    before = _entries(node)
    made = [await node.orchestrator.snapshot(source, f"kept-{number}" if number % 2 else None) for number in range(_MANY)]
    outcomes = [outcome for _ in range(_MANY // 10) for outcome in await node.orchestrator.fork(source, 10, 600)]
    if restarts:
        node.kill_server()
        await node.start_server()
    for template, _ in made:
        await node.orchestrator.delete_template(template.template_id)
    for outcome in outcomes:
        assert outcome.sandbox is not None
        await node.orchestrator.kill(outcome.sandbox.sandbox_id)
    await node.quiesce()
    assert _entries(node) == before
    assert [s.sandbox_id for s in (await node.orchestrator.search(SandboxFilter(), Page()))[0]] == [source]
    assert node.problems() == []


@pytest.mark.parametrize("turns", [1, 10, 60, 200])
async def test_a_caller_that_goes_away_leaves_only_what_is_listed_and_ends(node: FakeNode, turns: int) -> None:
    source = await node.create(3600)
    forking = asyncio.create_task(node.orchestrator.fork(source, 6, 60))
    for _ in range(turns):
        await asyncio.sleep(0)
    forking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await forking
    await node.quiesce()
    listed, _ = await node.orchestrator.search(SandboxFilter(), Page())
    assert {s.sandbox_id for s in listed} == {row.sandbox_id for row in node.parts.store.sandboxes() if row.state is State.RUNNING}
    node.clock.advance_ms(61_000)
    await node.quiesce()
    assert [row.sandbox_id for row in node.parts.store.sandboxes() if row.state is State.RUNNING] == [source]
    assert node.problems() == []
