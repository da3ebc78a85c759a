"""Nothing grows, however often sandboxes are made, forked, checkpointed, rolled back and killed: `AENV_CYCLES=500` for more cycles.

The table of what was measured is printed (`pytest -s`). What real guests, disks and networks leave is measured by tests/e2e/test_growth.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

from agentenv.core.lifecycle import State
from agentenv.testing.fake_node import FakeNode

_CYCLES = int(os.environ.get("AENV_CYCLES", "20"))
_PERIOD = 10  # cycles of a server; measured at the end of one
_CYCLES -= _CYCLES % _PERIOD
_RSS_MOST_MB = 4.0  # the allocator's own unrest
_DATABASE_MOST_KB = 256.0  # pages that SQLite has free


async def _cycle(node: FakeNode, number: int) -> None:
    """Everything a rollout does with its sandboxes, and now and then the server is another one."""
    parent = await node.create(600)
    assert node.process(parent).write("0", f"{number:06}")
    await node.orchestrator.checkpoint(parent, "start")
    assert node.process(parent).write("0", "wrong turn")
    await node.orchestrator.rollback(parent, "start")
    children = await node.orchestrator.fork(parent, 3, 600)
    await node.orchestrator.pause(parent)
    await node.orchestrator.snapshot(parent, "kept")  # a name that is given again
    await node.orchestrator.resume(parent, 600)
    for child in children:
        assert child.sandbox is not None
        assert node.content(child.sandbox.sandbox_id)["0"] == f"{number:06}"
    if number % _PERIOD == _PERIOD - 1:
        await _restart(node)
    for row in node.parts.store.sandboxes():
        if row.state is not State.KILLED:
            await node.orchestrator.kill(row.sandbox_id)
    node.clock.advance_ms(1000 * (node.config.limits.killed_kept_s + 60))  # rows of the killed are forgotten
    await node.quiesce()


async def _restart(node: FakeNode) -> None:
    await node.stop_server(step_ms=250)
    node._servers.clear()  # what the fakes remember of former servers for their own sake
    node._all_points.clear()
    await node.start_server()


def _measured(node: FakeNode) -> dict[str, float]:
    gc.collect()
    store, shared = node.parts.store, node.parts.shared
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = [path for path in node.paths.home.rglob("*") if path.is_file()]
    return {
        "RSS, MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "open files": len(list(Path("/proc/self/fd").iterdir())),
        "tasks": len(asyncio.all_tasks()),
        "database, KB": node.paths.database.stat().st_size / 1024,
        "disk bytes": sum(path.stat().st_size for path in files if not path.name.startswith("node.db")),
        "files": len(files),
        "rows": sum(len(rows) for rows in (store.sandboxes(), store.snapshots(), store.checkpoints.all())),
        "builds": sum(len(template.builds) for template in store.templates()),
        "VMMs": len(node.processes.alive()),
        "stacks": len(node.devices.stack_ids),
        "slots": len(node.network.present),
        "locks": len(shared._locks) + len(store._rows),
        "metrics": len(shared.metrics) + len(shared.expiry_retry_at_ms),
        "layers announced": len(node.parts.layers._announced),
    }


@pytest.mark.timeout(60 + 5 * _CYCLES)
async def test_cycles_leave_everything_where_it_was(ram_path: Path) -> None:
    node = FakeNode(ram_path / "node")
    await node.start_server()
    for number in range(_PERIOD):
        await _cycle(node, number)
    before = _measured(node)
    for number in range(_CYCLES):
        await _cycle(node, number)
    after = _measured(node)
    print(f"\n{_CYCLES} cycles      {'before':>12} {'after':>12}")
    for name in before:
        print(f"  {name:<16} {before[name]:>12.1f} {after[name]:>12.1f}")
    assert node.problems() == []
    assert after.pop("RSS, MB") - before.pop("RSS, MB") < _RSS_MOST_MB
    assert after.pop("database, KB") - before.pop("database, KB") < _DATABASE_MOST_KB
    assert after == before
    await node.close()
