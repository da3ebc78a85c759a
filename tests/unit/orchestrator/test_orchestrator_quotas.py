"""What a sandbox may use follows it through its life; its VM is in a control group as long as it lives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from warming import warmed_up

from agentenv.config.limits import LimitsConfig
from agentenv.core.errors import InvalidInput
from agentenv.core.quotas import NONE, Quotas
from agentenv.host.cgroup import Share
from agentenv.orchestrator.serve_volumes import life
from agentenv.testing.fake_node import FakeNode

NODE = LimitsConfig(memory_reserve_mb=0, disk_reserve_mb=0, cpu_percent_of_sandbox=200, network_mb_per_s_of_sandbox=8)
ASKED = Quotas(cpu_percent=50, disk_bytes_per_s=1 << 20)
HOLDS = Quotas(50, 1 << 20, 0, 8 << 20)


@pytest.fixture
async def limited(ram_path: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode(ram_path / "node", limits=NODE)
    await node.start_server()
    yield node
    await node.close()


def share(node: FakeNode, sandbox_id: str) -> Share:
    vm = node.row(sandbox_id).vm
    assert vm is not None
    pid, found = node.groups[life(sandbox_id, vm.run_id)]
    assert pid == vm.pid
    return found


def require(node: FakeNode, sandbox_id: str, holds: Quotas) -> None:
    vm = node.row(sandbox_id).vm
    assert vm is not None
    assert node.process(sandbox_id).spec.quotas == holds
    assert share(node, sandbox_id) == Share(16 + 64 + NODE.vmm_overhead_mb, holds, 1)  # K05: the guest's, translated code, the VMM's own
    assert node.network.bytes_per_s[vm.slot] == holds.network_bytes_per_s


async def test_limits_follow_a_sandbox_through_pause_fork_rollback_and_restart(limited: FakeNode) -> None:
    node = limited
    sandbox_id = await node.create(quotas=ASKED)
    require(node, sandbox_id, HOLDS)
    await node.orchestrator.pause(sandbox_id)
    await node.quiesce()
    assert node.groups == {}
    await node.orchestrator.connect(sandbox_id, 60)
    require(node, sandbox_id, HOLDS)
    (child,) = await node.orchestrator.fork(sandbox_id, 1, 60)
    assert child.sandbox is not None
    require(node, child.sandbox.sandbox_id, HOLDS)
    await node.orchestrator.checkpoint(sandbox_id, "here")
    await node.orchestrator.rollback(sandbox_id)
    require(node, sandbox_id, HOLDS)
    await node.quiesce()
    node.kill_server()
    node.groups["stray"] = (1, Share(0))
    await node.start_server()
    require(node, sandbox_id, HOLDS)
    await node.quiesce()
    assert node.problems() == []


async def test_without_asking_the_nodes_own_hold(limited: FakeNode) -> None:
    require(limited, await limited.create(), Quotas(200, 0, 0, 8 << 20))


@pytest.mark.parametrize("quotas", [Quotas(cpu_percent=201), Quotas(network_bytes_per_s=(8 << 20) + 1), Quotas(cpu_percent=1)])
async def test_what_the_node_does_not_give_is_refused_before_anything_is_made(limited: FakeNode, quotas: Quotas) -> None:
    with pytest.raises(InvalidInput, match=r"limits\.(cpuPercent|networkBytesPerSecond): "):
        await limited.create(quotas=quotas)
    assert limited.parts.store.sandboxes() == []


@pytest.mark.parametrize("own", [{"quotas": ASKED}, {"disk_mb": 1536}, {"quotas": ASKED, "disk_mb": 1536}])
async def test_one_with_limits_or_a_disk_of_its_own_does_not_take_a_vm_that_stands_ready(ram_path: Path, own: dict[str, Any]) -> None:
    node = FakeNode(ram_path / "node", warm=1)
    await node.start_server()
    ready = await warmed_up(node)
    made = await node.create(**own)
    assert made not in ready
    assert share(node, made).quotas == own.get("quotas", NONE)
    assert node.process(made).spec.machine.disk_mb == own.get("disk_mb", 64)
    assert await node.create() in ready
    await node.quiesce()
    assert node.problems() == []
    await node.close()
