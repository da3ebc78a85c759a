"""Network settings of real sandboxes: which policy their slots are under, through changes, pauses, forks and crashes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentenv.core.errors import AgentEnvError, Conflict, NotFound
from agentenv.core.model import LogQuery
from agentenv.core.network import EVERYWHERE, OPEN, Egress, EgressProxy, HeaderRule, NetworkSettings, addresses, unenforced
from agentenv.testing.fake_node import FakeNode

CLOSED = NetworkSettings(allow_out=("1.1.1.1",), deny_out=(EVERYWHERE,))


def _policy(node: FakeNode, sandbox_id: str) -> Egress:
    vm = node.row(sandbox_id).vm
    assert vm is not None
    return node.network.egress.get(vm.slot, OPEN)


@pytest.mark.parametrize(
    ("settings", "internet", "expected"),
    [
        (NetworkSettings(), None, OPEN),
        (NetworkSettings(), True, OPEN),
        (NetworkSettings(), False, Egress(deny=(EVERYWHERE,))),
        (NetworkSettings(allow_out=("1.1.1.1",)), False, Egress(("1.1.1.1/32",), (EVERYWHERE,))),
        (NetworkSettings(deny_out=("10.1.2.3/8", "fd00::/8")), None, Egress(deny=("10.0.0.0/8",))),
        (NetworkSettings(allow_out=("a.com",), deny_out=(EVERYWHERE,)), None, Egress(("8.8.8.8/32",), (EVERYWHERE,))),
        (
            NetworkSettings(allow_out=("a.com",), deny_out=(EVERYWHERE,), dns_servers=("9.9.9.9",)),
            None,
            Egress(("9.9.9.9/32",), (EVERYWHERE,)),
        ),
        (NetworkSettings(allow_out=("a.com",), deny_out=(EVERYWHERE,), dns_servers=()), None, Egress((), (EVERYWHERE,))),
        (NetworkSettings(dns_servers=("9.9.9.9",)), None, OPEN),
    ],
)
def test_what_the_packet_filter_is_given(settings: NetworkSettings, internet: bool | None, expected: Egress) -> None:
    assert addresses(settings, internet) == expected


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (CLOSED, []),
        (NetworkSettings(allow_out=("a.com", "1.1.1.1"), deny_out=(EVERYWHERE,)), ["network.allowOut"]),
        (NetworkSettings(egress_proxy=EgressProxy("p:1")), ["network.egressProxy"]),
        (NetworkSettings(rules={"a.com": (HeaderRule(),)}), ["network.rules"]),
        (NetworkSettings(rules={}), []),
        (NetworkSettings(https_ports=(443,)), ["network.httpsPorts"]),
    ],
)
async def test_what_is_not_enforced_is_said_in_the_sandboxs_log(node: FakeNode, settings: NetworkSettings, named: list[str]) -> None:
    assert [what.partition(":")[0] for what in unenforced(settings)] == named
    sandbox_id = await node.create(network=settings)
    warned = [e.message for e in await node.orchestrator.logs(sandbox_id, LogQuery(level="warn"))]
    assert [message.removeprefix("not enforced: ").partition(":")[0] for message in warned] == named


async def test_a_policy_reaches_the_slot_and_outlives_pause_and_fork(node: FakeNode) -> None:
    sandbox_id = await node.create(network=CLOSED)
    expected = Egress(("1.1.1.1/32",), (EVERYWHERE,))
    assert _policy(node, sandbox_id) == expected
    await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.resume(sandbox_id, 60)
    assert _policy(node, sandbox_id) == expected
    (child,) = await node.orchestrator.fork(sandbox_id, 1, 60)
    assert child.sandbox is not None
    assert (child.sandbox.network, _policy(node, child.sandbox.sandbox_id)) == (CLOSED, expected)


async def test_a_change_replaces_all_but_what_is_for_life(node: FakeNode) -> None:
    for_life = NetworkSettings(deny_out=("9.9.9.9",), mask_request_host="x", https_ports=(443,))
    sandbox_id = await node.create(network=for_life, allow_internet_access=False)
    await node.orchestrator.set_network(sandbox_id, NetworkSettings(deny_out=("8.8.8.8",)), None)
    assert node.row(sandbox_id).network == NetworkSettings(deny_out=("8.8.8.8",), mask_request_host="x", https_ports=(443,))
    assert _policy(node, sandbox_id) == Egress(deny=("8.8.8.8/32",))
    await node.orchestrator.set_network(sandbox_id, NetworkSettings(), None)
    assert _policy(node, sandbox_id) == OPEN


async def test_a_change_needs_a_running_sandbox(node: FakeNode) -> None:
    sandbox_id = await node.create()
    await node.orchestrator.pause(sandbox_id)
    with pytest.raises(Conflict, match="paused"):
        await node.orchestrator.set_network(sandbox_id, CLOSED, None)
    await node.orchestrator.kill(sandbox_id)
    with pytest.raises(NotFound):
        await node.orchestrator.set_network(sandbox_id, CLOSED, None)


@pytest.mark.parametrize("point", ["store.commit", "slots.apply", "slots.apply:done"])
async def test_a_change_that_fails_leaves_record_and_slot_as_they_were(node: FakeNode, point: str) -> None:
    sandbox_id = await node.create(network=NetworkSettings(deny_out=("9.9.9.9",)))
    before = node.row(sandbox_id).network
    node.points.fail(point)
    with pytest.raises(AgentEnvError):
        await node.orchestrator.set_network(sandbox_id, CLOSED, None)
    assert (node.row(sandbox_id).network, _policy(node, sandbox_id)) == (before, Egress(deny=("9.9.9.9/32",)))


async def test_a_server_killed_between_record_and_slot_applies_the_record_at_its_next_start(ram_path: Path) -> None:
    node = FakeNode(ram_path / "node")
    await node.start_server()
    sandbox_id = await node.create()
    with node.points.hold("slots.apply") as reached:
        changing = asyncio.ensure_future(node.orchestrator.set_network(sandbox_id, CLOSED, None))
        await reached.wait()
        node.kill_server()
        assert _policy(node, sandbox_id) == OPEN
        await node.start_server()
    assert (node.row(sandbox_id).network, _policy(node, sandbox_id)) == (CLOSED, Egress(("1.1.1.1/32",), (EVERYWHERE,)))
    changing.cancel()
    await node.close()
