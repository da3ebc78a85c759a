"""Checkpoints, rollback and `count` through the API: shapes, errors, and the Python client on top."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from api_rig import create

from agentenv.core.errors import Internal, LimitReached, StorageFull
from agentenv.testing.fake_orchestrator import FakeOrchestrator


async def take(client: httpx.AsyncClient, sandbox_id: str, **body: Any) -> dict[str, Any]:
    response = await client.post(f"/sandboxes/{sandbox_id}/checkpoints", json=body)
    assert response.status_code == 201, response.text
    return response.json()


async def test_taken_listed_gone_back_to_and_deleted(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    sandbox_id = await create(client)
    first = await take(client, sandbox_id, name="clean")
    second = await take(client, sandbox_id, memory=False)
    assert (first["parentID"], first["name"], first["memory"]) == (None, "clean", True)
    assert (second["parentID"], second["name"], second["memory"], second["current"]) == (first["checkpointID"], None, False, True)
    listed = (await client.get(f"/sandboxes/{sandbox_id}/checkpoints")).json()
    assert [item["current"] for item in listed] == [False, True]
    before = (await client.get(f"/sandboxes/{sandbox_id}")).json()
    for reference in ("clean", second["checkpointID"], first["checkpointID"]):
        back = await client.post(f"/sandboxes/{sandbox_id}/rollback", json={"checkpointID": reference})
        assert (back.status_code, back.json()["sandboxID"]) == (200, sandbox_id)
    after = (await client.get(f"/sandboxes/{sandbox_id}")).json()
    assert {**after, "startedAt": 0} == {**before, "startedAt": 0}
    assert orchestrator.peek(sandbox_id).checkpoint_id == first["checkpointID"]
    for reference in ("clean", second["checkpointID"]):
        assert (await client.delete(f"/sandboxes/{sandbox_id}/checkpoints/{reference}")).status_code == 204
        assert (await client.delete(f"/sandboxes/{sandbox_id}/checkpoints/{reference}")).status_code == 404
    assert (await client.get(f"/sandboxes/{sandbox_id}/checkpoints")).json() == []


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("checkpoints", {"name": "a b"}, 400),
        ("checkpoints", {"name": "taken"}, 409),
        ("checkpoints", {"name": 7}, 400),
        ("checkpoints", {"memory": "much"}, 400),
        ("rollback", {"checkpointID": "nothing"}, 404),
        ("rollback", {"checkpointID": ["taken"]}, 400),
    ],
)
async def test_what_cannot_be_says_so(client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int):
    sandbox_id = await create(client)
    await take(client, sandbox_id, name="taken")
    response = await client.post(f"/sandboxes/{sandbox_id}/{path}", json=body)
    assert (response.status_code, response.json()["code"]) == (status, status)
    assert response.json()["message"]
    gone = await client.post(f"/sandboxes/inothere/{path}", json={})
    assert gone.status_code == 404


async def test_without_a_checkpoint_there_is_no_way_back(client: httpx.AsyncClient):
    response = await client.post(f"/sandboxes/{await create(client)}/rollback")
    assert response.status_code == 400
    assert "no checkpoint" in response.json()["message"]


async def test_many_in_one_call_each_with_its_outcome(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    orchestrator.fail_next("create", StorageFull("the disk is full"))
    response = await client.post("/v2/sandboxes", json={"templateID": "base", "count": 4, "metadata": {"run": "7"}})
    assert response.status_code == 201
    failed, *made = response.json()
    assert (failed["error"]["code"], "full" in failed["error"]["message"]) == (507, True)
    assert len({item["sandbox"]["sandboxID"] for item in made}) == len({item["sandbox"]["envdAccessToken"] for item in made}) == 3
    assert all(orchestrator.peek(item["sandbox"]["sandboxID"]).metadata == {"run": "7"} for item in made)


@pytest.mark.parametrize("count", [0, 101, -1, "many", 1.5])
async def test_a_count_that_cannot_be(client: httpx.AsyncClient, count: Any):
    assert (await client.post("/v2/sandboxes", json={"templateID": "base", "count": count})).status_code == 400


async def test_what_concerns_all_fails_the_call(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    assert (await client.post("/v2/sandboxes", json={"templateID": "nothing", "count": 3})).status_code == 404
    orchestrator.sandboxes_running = 0
    response = await client.post("/v2/sandboxes", json={"templateID": "base", "count": 3})
    assert response.status_code == LimitReached("").status


async def test_a_repeated_call_gets_the_same_sandboxes(client: httpx.AsyncClient):
    body, headers = {"templateID": "base", "count": 3}, {"Idempotency-Key": "many-1"}
    first, again = [(await client.post("/v2/sandboxes", json=body, headers=headers)).json() for _ in range(2)]
    assert first == again
    assert len((await client.get("/v2/sandboxes")).json()) == 3
    other = await client.post("/v2/sandboxes", json={**body, "count": 2}, headers=headers)
    assert other.status_code == 422


@pytest.mark.parametrize("verb", ["snapshots", "checkpoints", "pause"])
async def test_durable_answers_when_all_is_written_out(client: httpx.AsyncClient, orchestrator: FakeOrchestrator, verb: str):
    sandbox_id = await create(client)
    if verb != "pause":
        await client.post(f"/sandboxes/{sandbox_id}/{verb}", json={})
        assert orchestrator.written_out == 0
    assert (await client.post(f"/sandboxes/{sandbox_id}/{verb}", json={"durable": True})).is_success
    assert orchestrator.written_out == 1


async def test_a_disk_that_cannot_be_written_out_is_told(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    sandbox_id = await create(client)
    orchestrator.fail_next("write_out", Internal("it was done, but the node's disk could not be written out: Input/output error"))
    response = await client.post(f"/sandboxes/{sandbox_id}/pause", json={"durable": True})
    assert (response.status_code, "it was done" in response.json()["message"]) == (500, True)
    assert orchestrator.peek(sandbox_id).state == "paused"
