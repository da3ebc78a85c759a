"""What a guest's programs have freed takes no room in its snapshots, what they hold does."""

from __future__ import annotations

from typing import Any

import pytest
from e2e_node import Node

MIB = 1 << 20
HELD_MIB = 64

#: Fills memory with bytes that cannot be left out, then holds it, frees it, or ends.
FILL = """
import os, sys, time
blocks = [os.urandom(1 << 20) for _ in range({mib})]
{then}
open("/home/user/filled", "w").close()
time.sleep({stays_s})
"""


def captured_bytes(node: Node, sandbox: Any) -> int:
    """What a pause adds to the disk."""
    folder = node.home / "layers"
    before = set(folder.iterdir())
    sandbox.pause()
    return sum(path.stat().st_blocks * 512 for path in set(folder.iterdir()) - before)


@pytest.mark.parametrize(
    ("then", "stays_s", "is_held"),
    [("pass", 600, True), ("pass", 0, False), ("del blocks", 600, False)],
    ids=["held", "its program has ended", "given back by its program"],
)
def test_freed_memory_is_in_no_snapshot(node: Node, sandbox: Any, then: str, stays_s: int, is_held: bool):
    sandbox.pause()
    sandbox.connect(timeout=600)  # what starting touched is in a layer of its own
    sandbox.files.write("/home/user/fill.py", FILL.format(mib=HELD_MIB, then=then, stays_s=stays_s))
    sandbox.commands.run("python3 fill.py", background=True, timeout=0)
    sandbox.commands.run(f"while [ ! -e filled ] || {{ [ {stays_s} = 0 ] && pgrep -f '[f]ill.py'; }}; do sleep 0.1; done", timeout=300)
    stored = captured_bytes(node, sandbox)
    if is_held:
        assert stored > HELD_MIB * MIB
    else:
        assert stored < HELD_MIB * MIB / 2, f"{stored / MIB:.0f} MiB"
