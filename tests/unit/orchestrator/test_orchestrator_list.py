from __future__ import annotations

import asyncio

import pytest

from agentenv.core.errors import Conflict, InvalidInput, NotFound
from agentenv.core.lifecycle import State
from agentenv.core.model import LogQuery, Page, SandboxFilter
from agentenv.core.network import Egress
from agentenv.testing.fake_node import FakeNode


async def _ids(node: FakeNode, wanted: SandboxFilter, page: Page | None = None) -> list[str]:
    return [s.sandbox_id for s in (await node.orchestrator.search(wanted, page or Page()))[0]]


async def test_filters_by_state_metadata_template_and_start(node: FakeNode) -> None:
    made = []
    for number in range(6):
        made.append(await node.create(metadata={"run": str(number % 2), "n": str(number)}))
        node.clock.advance_ms(1000)
    for sandbox_id in made[3:5]:
        await node.orchestrator.pause(sandbox_id)
    await node.orchestrator.kill(made[5])
    assert await _ids(node, SandboxFilter()) == made[4::-1]
    assert await _ids(node, SandboxFilter(frozenset({"running"}))) == made[2::-1]
    assert await _ids(node, SandboxFilter(frozenset({"paused"}))) == made[4:2:-1]
    assert await _ids(node, SandboxFilter(metadata={"run": "1"})) == [made[3], made[1]]
    assert await _ids(node, SandboxFilter(metadata={"run": "1", "n": "4"})) == []
    assert await _ids(node, SandboxFilter(template="base")) == made[4::-1]
    assert await _ids(node, SandboxFilter(template="other")) == []
    assert await _ids(node, SandboxFilter(started_after_ms=node.row(made[4]).started_at_ms)) == [made[4]]


@pytest.mark.parametrize("ascending", [False, True])
async def test_pages_hold_everything_once_while_others_come_and_go(node: FakeNode, ascending: bool) -> None:
    made = [await node.create() for _ in range(7)]  # all in the same millisecond
    seen: list[str] = []
    after = None
    while True:
        found, after = await node.orchestrator.search(SandboxFilter(), Page(3, after, ascending))
        seen += [s.sandbox_id for s in found]
        if after is None:
            break
        await node.orchestrator.kill(seen[-1])
    assert seen == sorted(made, reverse=not ascending)
    with pytest.raises(InvalidInput):
        await node.orchestrator.search(SandboxFilter(), Page(3, "nonsense"))


async def test_what_is_being_started_is_listed_and_what_ends_is_not(node: FakeNode) -> None:
    sandbox_id = await node.create()
    with node.points.hold("vm.kill") as reached:
        killing = asyncio.create_task(node.orchestrator.kill(sandbox_id))
        await reached.wait()
        assert node.row(sandbox_id).state is State.KILLING
        assert await _ids(node, SandboxFilter()) == []
        with pytest.raises(NotFound):
            await node.orchestrator.get(sandbox_id)
    await killing


async def test_verbs_in_the_wrong_state_say_so(node: FakeNode) -> None:
    sandbox_id = await node.create()
    with pytest.raises(Conflict, match="running already"):
        await node.orchestrator.resume(sandbox_id, 60)
    await node.orchestrator.pause(sandbox_id)
    with pytest.raises(Conflict, match="paused already"):
        await node.orchestrator.pause(sandbox_id)
    with pytest.raises(Conflict):
        await node.orchestrator.set_timeout(sandbox_id, 60)
    await node.orchestrator.kill(sandbox_id)
    for verb in (
        node.orchestrator.kill(sandbox_id),
        node.orchestrator.pause(sandbox_id),
        node.orchestrator.resume(sandbox_id, 60),
        node.orchestrator.connect(sandbox_id, 60),
        node.orchestrator.set_timeout(sandbox_id, 60),
        node.orchestrator.refresh(sandbox_id, 60),
        node.orchestrator.get(sandbox_id),
        node.orchestrator.logs("inothere", LogQuery()),
    ):
        with pytest.raises(NotFound):
            await verb
    with pytest.raises(NotFound, match="nothere"):
        await node.orchestrator.template("nothere")
    assert (await node.orchestrator.template(" Base:default ")).name == "base"


async def test_network_policy_and_tokens_reach_slot_and_guest(node: FakeNode) -> None:
    closed = await node.create(allow_internet_access=False, allow_public_traffic=False)
    row = node.row(closed)
    assert row.vm is not None
    assert node.network.egress[row.vm.slot] == Egress(deny=("0.0.0.0/0",))
    assert row.traffic_token not in (None, row.access_token)
    identity = node.process(closed).identity
    assert identity is not None
    assert identity.access_token == row.access_token
    await node.orchestrator.pause(closed)
    await node.orchestrator.resume(closed, 60)
    row = node.row(closed)
    assert row.vm is not None
    assert node.network.egress[row.vm.slot] == Egress(deny=("0.0.0.0/0",)), "a resumed sandbox lost its network policy"
