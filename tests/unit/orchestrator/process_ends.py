"""For tests in which a process that a verb works with ends, at each step of the verb."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from test_orchestrator_fail_at_step import VERBS, begin

from agentenv.core.errors import Conflict, NotFound, Unavailable
from agentenv.core.lifecycle import State
from agentenv.testing.fake_node import FakeNode

_STEPS_MAX = 100


async def at_each_step(node: FakeNode, name: str, strike: Callable[[], None]) -> None:
    """Run a verb anew for each of its steps, and `strike` there: it fails or works, says so plainly, and leaves nothing between."""
    before = VERBS[name][1]
    await node.parts.volumes.create("data")  # what the verbs of the table mount
    for step in range(_STEPS_MAX):
        sandbox_id = await node.create()
        await node.orchestrator.checkpoint(sandbox_id, "start")
        if before is State.PAUSED:
            await node.orchestrator.pause(sandbox_id)
        await node.quiesce()
        task, passed = await begin(node, name, sandbox_id, step)
        reached = len(passed) >= step and not task.done()
        where = f"{name}: struck after {passed}"
        strike()
        await node.quiesce()
        await asyncio.wait({task}, timeout=5)
        assert task.done(), where
        await node.quiesce()
        _require_said_plainly(node, sandbox_id, task, where)
        assert node.problems() == [], where
        assert node.parts.shared.troubles == {}, where
        for row in node.parts.store.sandboxes():
            if row.state is not State.KILLED:
                await node.orchestrator.kill(row.sandbox_id)
        if not reached:
            assert step > 2
            return
    pytest.fail(f"{name} has more steps: raise the limit of this test")


def _require_said_plainly(node: FakeNode, sandbox_id: str, task: asyncio.Task[None], where: str) -> None:
    """It worked, may be repeated, or says that its sandbox is gone: never that we have a fault."""
    error = task.exception()
    if error is None or isinstance(error, Unavailable):
        return
    assert isinstance(error, NotFound | Conflict), f"{where}: {error!r}"
    assert node.row(sandbox_id).state is State.KILLED, f"{where}: {error!r}"
