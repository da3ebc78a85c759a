"""Every verb that starts or captures a VM times its steps, each child of a fork included."""

from __future__ import annotations

import pytest

from agentenv.core.errors import Internal
from agentenv.core.spans import recording
from agentenv.testing.fake_node import FakeNode

STARTS = {"record", "check", "queue", "slot", "stacks", "guest"}
CAPTURES = {"record", "stop", "write", "seal"}


async def test_the_steps_of_each_verb(node: FakeNode) -> None:
    with recording() as create:
        sandbox_id = await node.create()
    with recording() as checkpoint:
        await node.orchestrator.checkpoint(sandbox_id, "")
    with recording() as rollback:
        await node.orchestrator.rollback(sandbox_id)
    with recording() as fork:
        await node.orchestrator.fork(sandbox_id, 3, 60)
    with recording() as pause:
        await node.orchestrator.pause(sandbox_id)
    with recording() as connect:
        await node.orchestrator.connect(sandbox_id, 60)
    assert set(create) == set(rollback) == set(connect) == STARTS
    assert set(checkpoint) == CAPTURES
    assert set(fork) == STARTS | CAPTURES
    assert set(pause) == CAPTURES | {"guest"}


@pytest.mark.parametrize("point", ["vmm.restore", "guest.initialise"])
async def test_a_start_that_fails_gives_its_place_in_the_queue_back(node: FakeNode, point: str) -> None:
    for _ in range(node.config.limits.starts_at_once + 1):
        node.points.fail(point, error=Internal("injected"))
        with pytest.raises(Internal, match="injected"):
            await node.create()
    assert await node.create()
