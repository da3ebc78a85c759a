"""`Idempotency-Key`: a repeated creation creates once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI

from agentenv.api.idempotency import LIFETIME_MS, IdempotencyCache
from agentenv.core.errors import LimitReached, Unavailable
from agentenv.testing.fake_orchestrator import FakeOrchestrator, ManualClock

BODY = {"templateID": "base"}
KEY = {"Idempotency-Key": "0b7e8f9e-1"}


async def test_same_key_same_reply(client: httpx.AsyncClient):
    first = await client.post("/v2/sandboxes", json=BODY, headers=KEY)
    second = await client.post("/v2/sandboxes", json=BODY, headers=KEY)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert len((await client.get("/sandboxes")).json()) == 1


async def test_defaults_spelled_out_are_the_same_request(client: httpx.AsyncClient):
    first = await client.post("/v2/sandboxes", json=BODY, headers=KEY)
    second = await client.post("/v2/sandboxes", json={"timeout": 300, "metadata": {}, **BODY}, headers=KEY)
    assert first.json() == second.json()


async def test_other_body_same_key(client: httpx.AsyncClient):
    await client.post("/v2/sandboxes", json=BODY, headers=KEY)
    response = await client.post("/v2/sandboxes", json={**BODY, "timeout": 60}, headers=KEY)
    assert (response.status_code, response.json()["error_code"]) == (422, "idempotency_request_mismatch")
    assert len((await client.get("/sandboxes")).json()) == 1


async def test_keys_belong_to_one_caller(client: httpx.AsyncClient):
    first = await client.post("/v2/sandboxes", json=BODY, headers=KEY)
    other = await client.post("/v2/sandboxes", json=BODY, headers={**KEY, "X-API-KEY": "e2b_" + "9" * 40})
    assert first.json()["sandboxID"] != other.json()["sandboxID"]


async def test_requests_under_way_are_joined(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    with orchestrator.hold("create") as arrived:
        both = [asyncio.create_task(client.post("/v2/sandboxes", json=BODY, headers=KEY)) for _ in range(2)]
        await asyncio.wait_for(arrived.wait(), 5)
        mismatch = await client.post("/v2/sandboxes", json={**BODY, "timeout": 1}, headers=KEY)
        assert mismatch.status_code == 422
    first, second = [(await task).json() for task in both]
    assert first == second
    assert len((await client.get("/sandboxes")).json()) == 1


async def test_the_work_outlives_a_caller_who_left(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    with orchestrator.hold("create") as arrived:
        request = asyncio.create_task(client.post("/v2/sandboxes", json=BODY, headers=KEY))
        await asyncio.wait_for(arrived.wait(), 5)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    reply = await client.post("/v2/sandboxes", json=BODY, headers=KEY)
    assert [item["sandboxID"] for item in (await client.get("/sandboxes")).json()] == [reply.json()["sandboxID"]]


async def test_failures_are_not_remembered(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    orchestrator.fail_next("create", Unavailable("starting"))
    assert (await client.post("/v2/sandboxes", json=BODY, headers=KEY)).status_code == 503
    assert (await client.post("/v2/sandboxes", json=BODY, headers=KEY)).status_code == 201


async def test_forgotten_after_an_hour(client: httpx.AsyncClient, clock: ManualClock):
    first = await client.post("/v2/sandboxes", json={**BODY, "timeout": 86_400}, headers=KEY)
    clock.advance_ms(LIFETIME_MS - 1)
    assert (await client.post("/v2/sandboxes", json={**BODY, "timeout": 86_400}, headers=KEY)).json() == first.json()
    clock.advance_ms(1)
    assert (await client.post("/v2/sandboxes", json={**BODY, "timeout": 86_400}, headers=KEY)).json() != first.json()


async def test_known_after_a_restart_of_the_server(
    app: FastAPI, client: httpx.AsyncClient, orchestrator: FakeOrchestrator, clock: ManualClock
):
    first = await client.post("/v2/sandboxes", json=BODY, headers=KEY)
    orchestrator.fail_next("create", Unavailable("starting"))
    other = {"Idempotency-Key": "other"}
    assert (await client.post("/v2/sandboxes", json=BODY, headers=other)).status_code == 503
    app.state.context = replace(app.state.context, creations=IdempotencyCache(clock))
    assert (await client.post("/v2/sandboxes", json=BODY, headers=KEY)).json() == first.json()
    assert (await client.post("/v2/sandboxes", json={**BODY, "timeout": 1}, headers=KEY)).status_code == 422
    assert (await client.post("/v2/sandboxes", json=BODY, headers=other)).status_code == 201
    await client.delete(f"/sandboxes/{first.json()['sandboxID']}")
    assert (await client.post("/v2/sandboxes", json=BODY, headers=KEY)).json() == first.json(), "a repeat is no new request"
    app.state.context = replace(app.state.context, creations=IdempotencyCache(clock))
    clock.advance_ms(LIFETIME_MS)
    assert (await client.post("/v2/sandboxes", json=BODY, headers=KEY)).json() != first.json()


@pytest.mark.parametrize("bad", ["", "UPPER", "with space", "x" * 256, "ünï"])
async def test_malformed_keys(bad: str, client: httpx.AsyncClient):
    response = await client.post("/v2/sandboxes", json=BODY, headers={b"Idempotency-Key": bad.encode()})
    assert response.status_code == 400
    assert "Idempotency-Key" in response.json()["message"]


async def test_the_cache_is_bounded():
    cache = IdempotencyCache(ManualClock(), max_entries=2)
    ran: list[str] = []

    async def work(name: str) -> dict[str, object]:
        ran.append(name)
        return {}

    for name in ("a", "b", "c"):
        await cache.once("caller", name, "", lambda name=name: work(name))
    assert len(cache) == 2
    await cache.once("caller", "c", "", lambda: work("c again"))
    await cache.once("caller", "a", "", lambda: work("a again"))
    assert ran == ["a", "b", "c", "a again"]


async def test_work_under_way_is_never_pushed_out():
    cache = IdempotencyCache(ManualClock(), max_entries=1)
    forever = asyncio.Event()

    async def stuck() -> dict[str, object]:
        await forever.wait()
        return {}

    waiting = asyncio.create_task(cache.once("caller", "a", "", stuck))
    await asyncio.sleep(0)
    with pytest.raises(LimitReached):
        await cache.once("caller", "b", "", stuck)
    await cache.aclose()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(cache) == 0
