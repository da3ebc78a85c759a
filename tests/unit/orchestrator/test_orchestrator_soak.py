"""Nobody vanishes before its time (case C33): two hours of many sandboxes, asked for every 20 s, over restarts and kills of the server.

The clock is ours, so the hours take seconds; `AENV_CASES=full` takes the 300 sandboxes of the report, `AENV_SEED` repeats a run.
tests/e2e/test_cases_c.py does the same for minutes with real guests.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import cast

import pytest

from agentenv.config.limits import LimitsConfig
from agentenv.core.lifecycle import State
from agentenv.core.model import LogQuery
from agentenv.proxy.routes import ProxyRefusal, RequestInfo, SandboxTarget
from agentenv.proxy.sandboxes import SandboxRoutes
from agentenv.testing.fake_node import FakeNode

_SANDBOXES = 300 if os.environ.get("AENV_CASES") == "full" else 40
_SEED = int(os.environ.get("AENV_SEED", "0")) or random.randrange(1, 1 << 30)
_HOURS_S, _STEP_S, _RESTART_S = 2 * 3600, 20, 600
_CRASHES_SHARE = 0.1


class _NoHeaders:
    def header(self, _name: str) -> str | None:
        return None


async def _refusal(node: FakeNode, sandbox_id: str) -> ProxyRefusal | None:
    """What a request to a port is answered by the proxy itself, if it does not reach the sandbox."""
    try:
        await SandboxRoutes(node.orchestrator).resolve(SandboxTarget(sandbox_id, 8000), cast(RequestInfo, _NoHeaders()))
    except ProxyRefusal as refusal:
        return refusal
    return None


async def _reason(node: FakeNode, sandbox_id: str) -> str:
    entries = await node.orchestrator.logs(sandbox_id, LogQuery())
    return next(entry.fields["reason"] for entry in entries if entry.message == "ended")


@pytest.mark.timeout(600)
async def test_two_hours_of_sandboxes_over_restarts(ram_path: Path) -> None:
    limits = LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=0, sandboxes_running=_SANDBOXES)
    node = FakeNode(ram_path / "node", pool_cidr="10.119.0.0/22", limits=limits)
    await node.start_server()
    rng = random.Random(_SEED)
    print(f"AENV_SEED={_SEED}")
    begun_ms = node.clock.now_ms()
    alive = {}
    for number in range(_SANDBOXES):
        sandbox_id = await node.create(rng.randrange(60, 2 * _HOURS_S) if number % 2 else _HOURS_S + 60)
        alive[sandbox_id] = node.row(sandbox_id).end_at_ms
    crashes = {
        rng.randrange(_HOURS_S // _STEP_S): sandbox_id for sandbox_id in rng.sample(sorted(alive), round(_CRASHES_SHARE * _SANDBOXES))
    }
    ended = {"its timeout was reached": 0, "its VM ended by itself: panic": 0}
    for step in range(_HOURS_S // _STEP_S):
        if step and step * _STEP_S % _RESTART_S == 0:
            if rng.random() < 0.5:
                await node.stop_server(step_ms=1)
            else:
                node.kill_server()
            await node.start_server()
        gone = {}
        if crashes.get(step) in alive:
            gone[crashes[step]] = "its VM ended by itself: panic"
            node.processes.end(node.process(crashes[step]), "panic")
            await node.quiesce()
        node.clock.advance_ms(1000 * _STEP_S)
        now_ms = node.clock.now_ms()
        gone |= {one: "its timeout was reached" for one, end_ms in alive.items() if end_ms <= now_ms and one not in gone}
        await (node.quiesce() if gone else node.turn())
        for sandbox_id in list(alive):
            refusal, left_s = await _refusal(node, sandbox_id), (alive[sandbox_id] - now_ms) / 1000
            if sandbox_id not in gone:
                assert refusal is None, f"{sandbox_id} with {left_s} s left, after {(now_ms - begun_ms) / 1000} s: {refusal}"
                continue
            del alive[sandbox_id]
            assert refusal is not None, f"{sandbox_id} is there with {left_s} s left"
            assert (refusal.status, "ended" in str(refusal.body)) == (502, True), refusal.body
            assert (await _reason(node, sandbox_id)).startswith(gone[sandbox_id])
            ended[gone[sandbox_id]] += 1
    assert all(ended.values()), ended
    assert len(alive) > _SANDBOXES // 2
    assert {node.row(sandbox_id).state for sandbox_id in alive} == {State.RUNNING}
    await node.quiesce()
    assert node.problems() == []
    await node.close()
