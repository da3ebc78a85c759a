"""For tests of a node that keeps VMs of the base template ready."""

from __future__ import annotations

import pytest

from agentenv.testing.fake_node import FakeNode


async def warmed_up(node: FakeNode) -> set[str]:
    """Use the template often enough for a VM of it to stand ready; those that do."""
    for _ in range(2):
        await node.create()
    for _ in range(30):
        await node.quiesce()
        if ready := set(node.parts.shared.warm.ready):
            return ready
        node.clock.advance_ms(5_000)
    pytest.fail("no VM stands ready")
