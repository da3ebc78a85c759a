"""A VMM ends while a verb is at work: whoever asked may ask again, or is told that the sandbox has ended; nothing is left over."""

from __future__ import annotations

import pytest
from process_ends import at_each_step
from test_orchestrator_fail_at_step import VERBS

from agentenv.testing.fake_node import FakeNode


@pytest.mark.parametrize("which", ["newest", "all"])
@pytest.mark.parametrize("name", VERBS)
async def test_at_each_step_of_each_verb(node: FakeNode, name: str, which: str) -> None:
    def strike() -> None:
        alive = node.processes.alive()
        for process in alive[-1:] if which == "newest" else alive:
            node.processes.end(process)

    await at_each_step(node, name, strike)
