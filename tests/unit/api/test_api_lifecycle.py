"""Pause, resume, connect, timeouts, fork, kill: statuses and meaning (contract section 2.4)."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

import httpx
import pytest

from agentenv.core.errors import Unavailable
from agentenv.testing.fake_orchestrator import FakeOrchestrator, ManualClock


@pytest.fixture
async def sandbox_id(client: httpx.AsyncClient) -> str:
    return (await client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 100})).json()["sandboxID"]


async def left_s(client: httpx.AsyncClient, clock: ManualClock, sandbox_id: str) -> float:
    ends = datetime.fromisoformat((await client.get(f"/sandboxes/{sandbox_id}")).json()["endAt"])
    return ends.timestamp() - clock.now_ms() / 1000


async def state(client: httpx.AsyncClient, sandbox_id: str) -> str | int:
    response = await client.get(f"/sandboxes/{sandbox_id}")
    return response.json()["state"] if response.status_code == 200 else response.status_code


async def test_kill(client: httpx.AsyncClient, sandbox_id: str):
    first = await client.delete(f"/sandboxes/{sandbox_id}")
    assert (first.status_code, first.content) == (204, b"")
    second = await client.delete(f"/sandboxes/{sandbox_id}")
    assert second.status_code == 404
    assert second.json()["message"] == f"Sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it"


async def test_kill_paused(client: httpx.AsyncClient, sandbox_id: str):
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    assert (await client.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
    assert await state(client, sandbox_id) == 404
    assert (await client.get("/v2/sandboxes")).json() == []


async def test_gone_while_being_killed(client: httpx.AsyncClient, orchestrator: FakeOrchestrator, sandbox_id: str):
    with orchestrator.hold("kill") as arrived:
        killing = asyncio.create_task(client.delete(f"/sandboxes/{sandbox_id}"))
        await asyncio.wait_for(arrived.wait(), 5)
        assert await state(client, sandbox_id) == 404
        assert (await client.get("/v2/sandboxes")).json() == []
    assert (await killing).status_code == 204


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b'{"memory":true,"requireHealthyGuest":false}'])
async def test_pause(content: bytes, client: httpx.AsyncClient, sandbox_id: str):
    first = await client.post(f"/sandboxes/{sandbox_id}/pause", content=content)
    assert (first.status_code, first.content) == (204, b"")
    assert await state(client, sandbox_id) == "paused"
    assert (await client.post(f"/sandboxes/{sandbox_id}/pause")).status_code == 409


async def test_paused_while_pausing(client: httpx.AsyncClient, orchestrator: FakeOrchestrator, sandbox_id: str):
    with orchestrator.hold("pause") as arrived:
        pausing = asyncio.create_task(client.post(f"/sandboxes/{sandbox_id}/pause"))
        await asyncio.wait_for(arrived.wait(), 5)
        assert await state(client, sandbox_id) == "paused"
        assert "pauseMode" not in (await client.get(f"/sandboxes/{sandbox_id}")).json()
    assert (await pausing).status_code == 204


async def test_failed_pause_lets_it_run(client: httpx.AsyncClient, orchestrator: FakeOrchestrator, sandbox_id: str):
    orchestrator.fail_next("pause", Unavailable("the disk is busy"))
    assert (await client.post(f"/sandboxes/{sandbox_id}/pause")).status_code == 503
    assert await state(client, sandbox_id) == "running"


@pytest.mark.parametrize("path", ["/v2/sandboxes/{}/connect", "/sandboxes/{}/connect"])
async def test_connect_only_extends(path: str, client: httpx.AsyncClient, clock: ManualClock, sandbox_id: str):
    shorter = await client.post(path.format(sandbox_id), json={"timeout": 10})
    assert shorter.status_code == 200
    assert await left_s(client, clock, sandbox_id) == 100
    assert (await client.post(path.format(sandbox_id), json={"timeout": 500})).status_code == 200
    assert await left_s(client, clock, sandbox_id) == 500


async def test_connect_resumes(client: httpx.AsyncClient, clock: ManualClock, orchestrator: FakeOrchestrator, sandbox_id: str):
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    clock.advance_ms(1_000_000)
    response = await client.post(f"/v2/sandboxes/{sandbox_id}/connect")
    assert response.status_code == 201
    assert response.json()["envdAccessToken"] == orchestrator.peek(sandbox_id).access_token
    assert await state(client, sandbox_id) == "running"
    assert await left_s(client, clock, sandbox_id) == 300


@pytest.mark.parametrize(("created_s", "expected_s"), [(100, 300), (3000, 3000)])
async def test_a_connect_without_timeout_gives_a_paused_one_what_it_was_created_with(
    created_s: int, expected_s: int, client: httpx.AsyncClient, clock: ManualClock
):
    sandbox_id = (await client.post("/v2/sandboxes", json={"templateID": "base", "timeout": created_s})).json()["sandboxID"]
    await client.post(f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 20})
    await client.post(f"/v2/sandboxes/{sandbox_id}/connect")
    assert await left_s(client, clock, sandbox_id) == 300, "one that runs is not given more than the contract's default"
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    clock.advance_ms(10_000_000)
    await client.post(f"/v2/sandboxes/{sandbox_id}/connect")
    assert await left_s(client, clock, sandbox_id) == expected_s


@pytest.mark.parametrize("generation", ["/v2/sandboxes/{}/connect", "/sandboxes/{}/connect", "/sandboxes/{}/resume"])
@pytest.mark.parametrize(
    "policy", [{"autoPause": True}, {"autoPause": True, "autoPauseMemory": False}, {"autoPause": True, "autoResume": {"enabled": True}}, {}]
)
async def test_coming_back_keeps_the_policy(
    generation: str, policy: dict[str, Any], client: httpx.AsyncClient, orchestrator: FakeOrchestrator
):
    sandbox_id = (await client.post("/v2/sandboxes", json={"templateID": "base", **policy})).json()["sandboxID"]
    before = orchestrator.peek(sandbox_id)
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    assert (await client.post(generation.format(sandbox_id), json={"timeout": 60})).status_code == 201
    after = orchestrator.peek(sandbox_id)
    names = (
        "on_timeout",
        "auto_pause_memory",
        "auto_resume",
        "timeout_s",
        "access_token",
        "traffic_token",
        "metadata",
        "env_vars",
        "network",
    )
    assert {name: getattr(after, name) for name in names} == {name: getattr(before, name) for name in names}


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 201),
        (b"{}", 201),
        (b"null", 201),
        (b'{"timeout":null}', 201),
        (b'{"timeout":0}', 400),
        (b'{"timeout":-1}', 400),
        (b'{"timeout":99999999}', 400),
    ],
)
async def test_bodies_of_a_resume(content: bytes, status: int, client: httpx.AsyncClient, sandbox_id: str):
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    assert (await client.post(f"/sandboxes/{sandbox_id}/resume", content=content)).status_code == status


async def test_connect_v1_needs_a_timeout(client: httpx.AsyncClient, sandbox_id: str):
    response = await client.post(f"/sandboxes/{sandbox_id}/connect", json={})
    assert (response.status_code, response.json()["message"]) == (400, "timeout: Field required")


async def test_resume(client: httpx.AsyncClient, clock: ManualClock, sandbox_id: str):
    assert (await client.post(f"/sandboxes/{sandbox_id}/resume")).status_code == 409
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    response = await client.post(f"/sandboxes/{sandbox_id}/resume")
    assert (response.status_code, response.json()["sandboxID"]) == (201, sandbox_id)
    assert await left_s(client, clock, sandbox_id) == 15


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
async def test_resume_changes_the_policy_only_when_asked(before: bool, asked: bool | None, client: httpx.AsyncClient):
    body = {"templateID": "base", "autoPause": before}
    sandbox_id = (await client.post("/v2/sandboxes", json=body)).json()["sandboxID"]
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    assert (await client.post(f"/sandboxes/{sandbox_id}/resume", json={"autoPause": asked})).status_code == 201
    lifecycle = (await client.get(f"/sandboxes/{sandbox_id}")).json()["lifecycle"]
    assert lifecycle["onTimeout"] == ("pause" if (before if asked is None else asked) else "kill")


@pytest.mark.parametrize("timeout_s", [10, 1000])
async def test_set_timeout_shortens_and_extends(timeout_s: int, client: httpx.AsyncClient, clock: ManualClock, sandbox_id: str):
    response = await client.post(f"/sandboxes/{sandbox_id}/timeout", json={"timeout": timeout_s})
    assert (response.status_code, response.content) == (204, b"")
    assert await left_s(client, clock, sandbox_id) == timeout_s


@pytest.mark.parametrize(("auto_pause", "then"), [(False, 404), (True, "paused")])
async def test_set_timeout_zero_acts_now(auto_pause: bool, then: str | int, client: httpx.AsyncClient):
    sandbox_id = (await client.post("/v2/sandboxes", json={"templateID": "base", "autoPause": auto_pause})).json()["sandboxID"]
    assert (await client.post(f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 0})).status_code == 204
    assert await state(client, sandbox_id) == then


@pytest.mark.parametrize(("auto_pause", "then"), [(False, 404), (True, "paused")])
async def test_expiry_by_policy(auto_pause: bool, then: str | int, client: httpx.AsyncClient, clock: ManualClock):
    body = {"templateID": "base", "autoPause": auto_pause, "timeout": 10}
    sandbox_id = (await client.post("/v2/sandboxes", json=body)).json()["sandboxID"]
    clock.advance_ms(9_999)
    assert await state(client, sandbox_id) == "running"
    clock.advance_ms(1)
    assert await state(client, sandbox_id) == then


async def test_set_timeout_of_a_paused_one(client: httpx.AsyncClient, sandbox_id: str):
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    assert (await client.post(f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 10})).status_code == 409


@pytest.mark.parametrize(("duration_s", "expected_s"), [(None, 100), (5, 100), (0, 100), (3600, 3600)])
async def test_refresh_only_extends(
    duration_s: int | None, expected_s: int, client: httpx.AsyncClient, clock: ManualClock, sandbox_id: str
):
    assert (await client.post(f"/sandboxes/{sandbox_id}/refreshes", json={"duration": duration_s})).status_code == 204
    assert await left_s(client, clock, sandbox_id) == expected_s


async def test_refresh_adds_at_least_15_s(client: httpx.AsyncClient, clock: ManualClock, sandbox_id: str):
    clock.advance_ms(99_000)
    await client.post(f"/sandboxes/{sandbox_id}/refreshes", json={"duration": 2})
    assert await left_s(client, clock, sandbox_id) == 15


@pytest.mark.parametrize("paused", [False, True])
async def test_fork(paused: bool, client: httpx.AsyncClient, orchestrator: FakeOrchestrator, clock: ManualClock):
    body = {"templateID": "base", "metadata": {"a": "b"}, "network": {"allowPublicTraffic": False}}
    source = (await client.post("/v2/sandboxes", json=body)).json()
    if paused:
        await client.post(f"/sandboxes/{source['sandboxID']}/pause")
    response = await client.post(f"/sandboxes/{source['sandboxID']}/fork", json={"count": 3, "timeout": 40})
    assert response.status_code == 201
    children = [item["sandbox"] for item in response.json()]
    for name in ("sandboxID", "envdAccessToken", "trafficAccessToken"):
        assert len({child[name] for child in [*children, source]}) == 4, f"{name} is shared between forks"
    assert await state(client, source["sandboxID"]) == ("paused" if paused else "running")
    for child in children:
        detail = (await client.get(f"/sandboxes/{child['sandboxID']}")).json()
        assert (detail["metadata"], detail["state"]) == ({"a": "b"}, "running")
        assert await left_s(client, clock, child["sandboxID"]) == 40


@pytest.mark.parametrize("content", [b"", b"{}"])
async def test_fork_defaults(content: bytes, client: httpx.AsyncClient, clock: ManualClock, sandbox_id: str):
    (only,) = (await client.post(f"/sandboxes/{sandbox_id}/fork", content=content)).json()
    assert await left_s(client, clock, only["sandbox"]["sandboxID"]) == 15


@pytest.mark.parametrize(
    ("call", "body", "named"),
    [
        ("timeout", {}, "timeout: Field required"),
        ("timeout", {"timeout": -1}, "timeout: must be 0 to 86400"),
        ("timeout", {"timeout": 86401}, "Timeout cannot be greater than 24 hours"),
        ("timeout", {"timeout": None}, "timeout"),
        ("resume", {"timeout": -1}, "timeout: must be 1 to 86400"),
        ("resume", {"timeout": 10**9}, "Timeout cannot be greater"),
        ("connect", {"timeout": -1}, "timeout: must be 1 to 86400"),
        ("connect", {"timeout": 10**9}, "Timeout cannot be greater"),
        ("connect", {"timeout": "9"}, "timeout"),
        ("refreshes", {"duration": 3601}, "duration"),
        ("refreshes", {"duration": -1}, "duration"),
        ("fork", {"count": 0}, "count"),
        ("fork", {"count": 101}, "count"),
        ("fork", {"count": 1000}, "count"),
        ("fork", {"count": -1}, "count"),
        ("fork", {"count": 1.5}, "count"),
        ("fork", {"count": [2]}, "count"),
        ("fork", {"count": "2"}, "count"),
        ("fork", {"timeout": 0}, "timeout: must be 1 to 86400"),
        ("pause", {"memory": "no"}, "memory"),
    ],
)
async def test_bad_fields_are_named(call: str, body: dict[str, Any], named: str, client: httpx.AsyncClient, sandbox_id: str):
    response = await client.post(f"/sandboxes/{sandbox_id}/{call}", json=body)
    assert response.status_code == 400
    assert named in response.json()["message"]


@pytest.mark.parametrize(("body", "mode"), [({}, "full"), ({"memory": True}, "full"), ({"memory": False}, "filesystem")])
async def test_the_mode_of_a_pause_is_shown_while_it_is_paused(body: dict[str, Any], mode: str, client: httpx.AsyncClient, sandbox_id: str):
    assert (await client.post(f"/sandboxes/{sandbox_id}/pause", json=body)).status_code == 204
    detail = (await client.get(f"/sandboxes/{sandbox_id}")).json()
    assert (detail["state"], detail["pauseMode"]) == ("paused", mode)
    assert "envdUnresponsiveAtPause" not in detail
    assert (await client.post(f"/v2/sandboxes/{sandbox_id}/connect")).status_code == 201
    assert "pauseMode" not in (await client.get(f"/sandboxes/{sandbox_id}")).json()


@pytest.mark.parametrize(
    ("fields", "mode"), [({}, "full"), ({"autoPauseMemory": True}, "full"), ({"autoPauseMemory": False}, "filesystem")]
)
async def test_the_pause_at_the_timeout_saves_what_was_asked(fields: dict[str, Any], mode: str, client: httpx.AsyncClient):
    body = {"templateID": "base", "autoPause": True, **fields}
    sandbox_id = (await client.post("/v2/sandboxes", json=body)).json()["sandboxID"]
    await client.post(f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 0})
    assert (await client.get(f"/sandboxes/{sandbox_id}")).json()["pauseMode"] == mode


@pytest.mark.parametrize("body", [{"memory": False}, {"requireHealthyGuest": True}, {"memory": False, "requireHealthyGuest": True}])
async def test_a_guest_that_must_answer_and_does_not(
    body: dict[str, Any], client: httpx.AsyncClient, orchestrator: FakeOrchestrator, sandbox_id: str
):
    orchestrator.hung.add(sandbox_id)
    response = await client.post(f"/sandboxes/{sandbox_id}/pause", json=body)
    assert (response.status_code, response.json()["code"]) == (503, 503)
    assert await state(client, sandbox_id) == "running"


@pytest.mark.parametrize("path", ["/v2/sandboxes/{}/connect", "/sandboxes/{}/connect", "/sandboxes/{}/resume"])
async def test_a_guest_that_did_not_answer_comes_back_from_its_disk_only(
    path: str, client: httpx.AsyncClient, orchestrator: FakeOrchestrator, sandbox_id: str
):
    orchestrator.hung.add(sandbox_id)
    assert (await client.post(f"/sandboxes/{sandbox_id}/pause")).status_code == 204
    assert (await client.get(f"/sandboxes/{sandbox_id}")).json()["envdUnresponsiveAtPause"] is True
    refused = await client.post(path.format(sandbox_id), json={"timeout": 60})
    assert (refused.status_code, refused.json()["error_code"]) == (409, "sandbox_snapshot_guest_agent_unresponsive")
    assert await state(client, sandbox_id) == "paused"
    assert (await client.post(path.format(sandbox_id), json={"timeout": 60, "memory": False})).status_code == 201
    assert "envdUnresponsiveAtPause" not in (await client.get(f"/sandboxes/{sandbox_id}")).json()


async def test_logs(client: httpx.AsyncClient, clock: ManualClock, sandbox_id: str):
    clock.advance_ms(1000)
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    body = (await client.get(f"/sandboxes/{sandbox_id}/logs")).json()
    messages = [entry["message"] for entry in body["logEntries"]]
    assert messages == ["creating -> running", "running -> pausing", "pausing -> paused"]
    for line, entry in zip(body["logs"], body["logEntries"], strict=True):
        parsed = json.loads(line["line"])
        assert (parsed["level"], parsed["logger"], parsed["message"]) == ("info", "lifecycle", entry["message"])
        assert line["timestamp"] == entry["timestamp"]
    late = await client.get(f"/sandboxes/{sandbox_id}/logs?start={clock.now_ms()}&limit=1")
    assert [entry["message"] for entry in late.json()["logEntries"]] == ["running -> pausing"]


async def test_logs_v2(client: httpx.AsyncClient, clock: ManualClock, sandbox_id: str):
    started_ms = clock.now_ms()
    clock.advance_ms(1000)
    await client.post(f"/sandboxes/{sandbox_id}/pause")

    async def messages(query: str) -> list[str]:
        response = await client.get(f"/v2/sandboxes/{sandbox_id}/logs?{query}")
        assert response.status_code == 200
        return [entry["message"] for entry in response.json()["logs"]]

    assert await messages("") == ["creating -> running", "running -> pausing", "pausing -> paused"]
    assert await messages("direction=backward&limit=2") == ["pausing -> paused", "running -> pausing"]
    assert await messages(f"direction=backward&cursor={started_ms}") == ["creating -> running"]
    assert await messages(f"cursor={started_ms + 1}") == ["running -> pausing", "pausing -> paused"]
    assert await messages("search=creating") == ["creating -> running"]
    assert await messages("level=warn") == []
    for bad in ("level=loud", "direction=up", "limit=-1", "limit=1001", "cursor=x"):
        assert (await client.get(f"/v2/sandboxes/{sandbox_id}/logs?{bad}")).status_code == 400
