"""The node's own route table over a real orchestrator: who may wake a sandbox, how often, for how long, and what others are told."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from agentenv.core.errors import HostNotReady
from agentenv.core.lifecycle import State
from agentenv.core.network import NetworkSettings
from agentenv.proxy.routes import ENVD_PORT, ProxyRefusal, RequestInfo, Route, SandboxTarget
from agentenv.proxy.sandboxes import SandboxRoutes
from agentenv.proxy.signed_urls import SignedFile
from agentenv.testing.fake_node import FakeNode

APP_PORT = 8000


class _Request:
    """The headers of a request."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def header(self, name: str) -> str | None:
        """By name in lower case."""
        return self._headers.get(name)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode(tmp_path / "node")
    await node.start_server()
    yield node
    await node.close()


@pytest.fixture
def routes(node: FakeNode) -> SandboxRoutes:
    return SandboxRoutes(node.orchestrator)


async def _asleep(node: FakeNode, memory: bool = True, timeout_s: int = 60, **fields: object) -> str:
    sandbox_id = await node.create(timeout_s, auto_resume=True, on_timeout="pause", **fields)
    await node.orchestrator.pause(sandbox_id, memory)
    await node.quiesce()
    return sandbox_id


async def _ask(routes: SandboxRoutes, sandbox_id: str, port: int = APP_PORT, **headers: str) -> Route:
    request = _Request({name.replace("_", "-"): value for name, value in headers.items()})
    return await routes.resolve(SandboxTarget(sandbox_id, port), cast(RequestInfo, request))


def _starts(node: FakeNode) -> int:
    return node.points.passed.count("vmm.restore") + node.points.passed.count("vmm.boot")


async def test_traffic_wakes_a_sandbox_whose_policy_says_so(node: FakeNode, routes: SandboxRoutes) -> None:
    sandbox_id = await _asleep(node)
    await _ask(routes, sandbox_id)
    row = node.row(sandbox_id)
    assert (row.state, row.end_at_ms) == (State.RUNNING, node.clock.now_ms() + 300_000)


@pytest.mark.parametrize(("created_s", "expected_s"), [(15, 300), (300, 300), (301, 301), (4000, 4000)])
async def test_it_then_lives_as_long_as_it_was_created_for_and_at_least_five_minutes(
    node: FakeNode, routes: SandboxRoutes, created_s: int, expected_s: int
) -> None:
    sandbox_id = await _asleep(node, timeout_s=created_s)
    await _ask(routes, sandbox_id)
    assert node.row(sandbox_id).end_at_ms == node.clock.now_ms() + 1000 * expected_s


async def test_a_shorter_timeout_set_later_is_not_what_it_was_created_for(node: FakeNode, routes: SandboxRoutes) -> None:
    sandbox_id = await node.create(4000, auto_resume=True, on_timeout="pause")
    await node.orchestrator.set_timeout(sandbox_id, 0)
    await _ask(routes, sandbox_id)
    assert node.row(sandbox_id).end_at_ms == node.clock.now_ms() + 4_000_000


@pytest.mark.parametrize("port", [APP_PORT, ENVD_PORT])
async def test_fifty_requests_at_once_start_one_vm(node: FakeNode, routes: SandboxRoutes, port: int) -> None:
    sandbox_id = await _asleep(node)
    before, token = _starts(node), node.row(sandbox_id).access_token
    found = await asyncio.gather(*(_ask(routes, sandbox_id, port, x_access_token=token) for _ in range(50)))
    assert _starts(node) == before + 1
    assert len({id(route.closed) for route in found}) == 1
    await node.quiesce()
    assert node.problems() == []


async def test_requests_that_come_while_it_wakes_wait_for_it(node: FakeNode, routes: SandboxRoutes) -> None:
    sandbox_id = await _asleep(node)
    with node.points.hold("guest.initialise") as reached:
        first = asyncio.create_task(_ask(routes, sandbox_id))
        await reached.wait()
        assert node.row(sandbox_id).state is State.RESUMING
        late = asyncio.create_task(_ask(routes, sandbox_id))
        await node.turn()
        assert not late.done()
    await asyncio.gather(first, late)


async def test_waiting_for_somebody_elses_resume_does_not_change_its_timeout(node: FakeNode, routes: SandboxRoutes) -> None:
    sandbox_id = await node.create(60)
    await node.orchestrator.pause(sandbox_id)
    with node.points.hold("guest.initialise") as reached:
        resuming = asyncio.create_task(node.orchestrator.connect(sandbox_id, 20))
        await reached.wait()
        request = asyncio.create_task(_ask(routes, sandbox_id))
        await node.turn()
    await asyncio.gather(resuming, request)
    assert node.row(sandbox_id).end_at_ms == node.clock.now_ms() + 20_000


@pytest.mark.parametrize("token", [None, "", "wrong"])
async def test_envds_port_wakes_only_for_the_holder_of_its_token(node: FakeNode, routes: SandboxRoutes, token: str | None) -> None:
    sandbox_id = await _asleep(node)
    before = _starts(node)
    headers = {} if token is None else {"x_access_token": token}
    with pytest.raises(ProxyRefusal) as refused:
        await _ask(routes, sandbox_id, ENVD_PORT, **headers)
    assert (refused.value.status, refused.value.body["message"]) == (502, "The sandbox was not found")
    assert (node.row(sandbox_id).state, _starts(node)) == (State.PAUSED, before)
    await _ask(routes, sandbox_id, ENVD_PORT, x_access_token=node.row(sandbox_id).access_token)
    assert node.row(sandbox_id).state is State.RUNNING


@pytest.mark.parametrize("token", [None, "", "any"])
async def test_an_agent_without_a_token_wakes_for_anyone(node: FakeNode, routes: SandboxRoutes, token: str | None) -> None:
    sandbox_id = await _asleep(node, secure=False)
    await _ask(routes, sandbox_id, ENVD_PORT, **({} if token is None else {"x_access_token": token}))
    assert node.row(sandbox_id).state is State.RUNNING


@pytest.mark.parametrize("secure", [True, False])
async def test_a_signature_never_finds_a_sandbox_that_has_no_token(node: FakeNode, routes: SandboxRoutes, secure: bool) -> None:
    """Whoever does not know its id cannot make it up with an empty token."""
    sandbox_id = await node.create(secure=secure)
    digest = hashlib.sha256(f"/a:read::{node.row(sandbox_id).access_token}".encode()).digest()
    signature = "v1_" + base64.b64encode(digest).decode().rstrip("=")
    assert routes.signer(SignedFile("/a", "read", "", signature, None)) == (sandbox_id if secure else None)


@pytest.mark.parametrize("token", [None, "", "wrong"])
async def test_a_private_port_wakes_only_for_the_holder_of_the_traffic_token(
    node: FakeNode, routes: SandboxRoutes, token: str | None
) -> None:
    sandbox_id = await _asleep(node, allow_public_traffic=False)
    before = _starts(node)
    headers = {} if token is None else {"e2b_traffic_access_token": token}
    with pytest.raises(ProxyRefusal) as refused:
        await _ask(routes, sandbox_id, **headers)
    assert refused.value.status == 403
    assert (node.row(sandbox_id).state, _starts(node)) == (State.PAUSED, before)
    traffic_token = node.row(sandbox_id).traffic_token or ""
    await asyncio.gather(*(_ask(routes, sandbox_id, e2b_traffic_access_token=traffic_token) for _ in range(50)))
    assert _starts(node) == before + 1


async def test_a_sandbox_without_its_memory_is_never_woken_by_traffic(node: FakeNode, routes: SandboxRoutes) -> None:
    sandbox_id = await _asleep(node, memory=False)
    with pytest.raises(ProxyRefusal) as refused:
        await _ask(routes, sandbox_id)
    assert (refused.value.status, node.row(sandbox_id).state) == (502, State.PAUSED)
    await node.orchestrator.connect(sandbox_id, 60)
    await _ask(routes, sandbox_id)


async def test_traffic_that_comes_during_a_pause_of_the_disk_does_not_undo_it(node: FakeNode, routes: SandboxRoutes) -> None:
    sandbox_id = await node.create(60, auto_resume=True)
    with node.points.hold("blocks.seal") as reached:
        pausing = asyncio.create_task(node.orchestrator.pause(sandbox_id, memory=False))
        await reached.wait()
        request = asyncio.create_task(_ask(routes, sandbox_id))
        await node.turn()
    await pausing
    with pytest.raises(ProxyRefusal):
        await request
    assert node.row(sandbox_id).state is State.PAUSED


async def test_traffic_that_comes_during_a_full_pause_wakes_it_afterwards(node: FakeNode, routes: SandboxRoutes) -> None:
    sandbox_id = await node.create(60, auto_resume=True)
    with node.points.hold("blocks.seal") as reached:
        pausing = asyncio.create_task(node.orchestrator.pause(sandbox_id))
        await reached.wait()
        request = asyncio.create_task(_ask(routes, sandbox_id))
        await node.turn()
    await asyncio.gather(pausing, request)
    assert node.row(sandbox_id).state is State.RUNNING


async def test_a_failed_wake_is_told_and_the_sandbox_stays_asleep(node: FakeNode, routes: SandboxRoutes) -> None:
    sandbox_id = await _asleep(node)
    node.points.fail("vmm.restore", error=HostNotReady("injected"))
    with pytest.raises(HostNotReady):
        await _ask(routes, sandbox_id)
    await node.quiesce()
    assert node.row(sandbox_id).state is State.PAUSED
    await _ask(routes, sandbox_id)


async def test_what_is_not_there_says_why_and_always_in_the_contracts_words(node: FakeNode, routes: SandboxRoutes) -> None:
    paused, ended = await node.create(), await node.create()
    await node.orchestrator.pause(paused)
    await node.orchestrator.kill(ended)
    for sandbox_id, state in ((paused, "paused"), (ended, "ended"), ("i" + "0" * 20, "unknown")):
        with pytest.raises(ProxyRefusal) as refused:
            await _ask(routes, sandbox_id)
        assert refused.value.status == 502
        assert refused.value.body == {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502, "state": state}


async def test_the_mask_of_the_host_reaches_the_route(node: FakeNode, routes: SandboxRoutes) -> None:
    masked = await node.create(network=NetworkSettings(mask_request_host="localhost:${PORT}"))
    plain = await node.create()
    assert (await _ask(routes, masked)).mask_host == "localhost:${PORT}"
    assert (await _ask(routes, plain)).mask_host is None


@pytest.mark.parametrize(("port", "heard"), [(ENVD_PORT, True), (APP_PORT, False)])
async def test_only_answers_of_its_agent_tell_that_the_guest_is_well(node: FakeNode, routes: SandboxRoutes, port: int, heard: bool) -> None:
    sandbox_id = await node.create()
    node.clock.advance_ms(5000)
    route = await _ask(routes, sandbox_id, port)
    if route.heard is not None:
        route.heard()
    assert (node.parts.shared.heard_ms[sandbox_id] == node.clock.monotonic_ms()) is heard
