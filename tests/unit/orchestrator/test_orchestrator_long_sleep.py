"""A sandbox that was away for a month (case C07): nothing of it was taken for old, and its time begins when it is back."""

from __future__ import annotations

import pytest

from agentenv.core.lifecycle import State
from agentenv.testing.fake_node import FakeNode

_MONTH_MS = 30 * 24 * 3_600_000
_STEPS = 40  # the keepers of the node look around again and again meanwhile


async def _a_month(node: FakeNode) -> None:
    for _ in range(_STEPS):
        node.clock.advance_ms(_MONTH_MS / _STEPS)
        await node.quiesce()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("how", ["resume", "fork", "rollback", "boot"])
async def test_after_a_month_it_is_what_it_was(node: FakeNode, how: str, restart: bool) -> None:
    sandbox_id = await node.create(60)
    assert node.process(sandbox_id).write("0", "kept")
    if how == "rollback":
        await node.orchestrator.checkpoint(sandbox_id, "then")
        assert node.process(sandbox_id).write("0", "later")
    await node.orchestrator.pause(sandbox_id)
    await _a_month(node)
    if restart:
        node.kill_server()
        await node.start_server()
    now_ms = node.clock.now_ms()
    if how == "fork":
        (child,) = await node.orchestrator.fork(sandbox_id, 1, 90)
        assert child.sandbox is not None
        back_id = child.sandbox.sandbox_id
    else:
        await node.orchestrator.resume(sandbox_id, 90, how != "boot")
        back_id = sandbox_id
        if how == "rollback":
            await node.orchestrator.rollback(sandbox_id, "then")
    row = node.row(back_id)
    assert (row.state, row.end_at_ms) == (State.RUNNING, now_ms + 90_000)
    assert node.content(back_id)["0"] == "kept"
    identity = node.process(back_id).identity
    assert identity is not None
    assert identity.sandbox_id == back_id
    await node.quiesce()
    assert node.problems() == []
