"""Snapshots through the API: taken, listed, created from, deleted."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from api_rig import create

from agentenv.core.errors import StorageFull
from agentenv.core.model import LogQuery
from agentenv.testing.fake_orchestrator import FakeOrchestrator, ManualClock


async def snap(client: httpx.AsyncClient, sandbox_id: str, **body: Any) -> dict[str, Any]:
    response = await client.post(f"/sandboxes/{sandbox_id}/snapshots", json=body)
    assert response.status_code == 201, response.text
    return response.json()


async def listed(client: httpx.AsyncClient, **query: Any) -> list[str]:
    response = await client.get("/snapshots", params=query)
    assert response.status_code == 200, response.text
    return [item["snapshotID"] for item in response.json()]


def delete(client: httpx.AsyncClient, snapshot_id: str) -> Any:
    return client.delete(f"/templates/{quote(snapshot_id, safe='')}")


@pytest.mark.parametrize("body", [None, "null", "{}"], ids=["no body", "null", "an empty object"])
async def test_without_a_name_it_is_called_by_its_template(body: str | None, client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    source = await create(client)
    response = await client.post(f"/sandboxes/{source}/snapshots", content=body)
    assert response.status_code == 201
    snapshot = response.json()
    template_id, _, tag = snapshot["snapshotID"].partition(":")
    assert (tag, snapshot["names"]) == ("default", [])
    assert orchestrator.peek(source).state == "running"
    for reference in (snapshot["snapshotID"], template_id):
        made = (await client.post("/v2/sandboxes", json={"templateID": reference})).json()
        assert (made["templateID"], made["alias"]) == (template_id, template_id)


@pytest.mark.parametrize(
    ("name", "snapshot_id"),
    [("mine", "local/mine:default"), (" Mine:V1 ", "local/mine:v1"), ("local/my_own-1:a.b", "local/my_own-1:a.b")],
)
async def test_with_a_name_it_is_called_by_it(name: str, snapshot_id: str, client: httpx.AsyncClient):
    source = await create(client)
    assert await snap(client, source, name=name) == {"snapshotID": snapshot_id, "names": [snapshot_id]}
    for reference in (snapshot_id, snapshot_id.upper(), snapshot_id.removeprefix("local/")):
        assert (await client.post("/sandboxes", json={"templateID": reference})).status_code == 201
    assert (await client.post("/sandboxes", json={"templateID": snapshot_id.replace("local", "team")})).status_code == 404


@pytest.mark.parametrize(
    "name", ["", " ", "ä", "a b", "a:", ":v1", "a/b/c", "team/a", "a:6b5a0a06-9c2c-4b5e-8a43-0e5f5b1f8f6b", "base", "local/base:v1"]
)
async def test_a_bad_name_is_refused_and_the_sandbox_left_alone(name: str, client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    source = await create(client)
    response = await client.post(f"/sandboxes/{source}/snapshots", json={"name": name})
    assert response.status_code == 400
    assert response.json()["message"].startswith("name: ")
    assert "snapshotting" not in str(await orchestrator.logs(source, LogQuery()))
    assert await listed(client) == []


async def test_a_sandbox_made_from_it_has_the_sources_machine_and_env_and_its_own_identity(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
):
    source = await create(client, envVars={"A": "1", "B": "2"}, metadata={"of": "source"})
    snapshot = await snap(client, source)
    made = orchestrator.peek(await create(client, templateID=snapshot["snapshotID"], envVars={"B": "3"}))
    before = orchestrator.peek(source)
    assert (made.env_vars, made.metadata, made.machine) == ({"A": "1", "B": "3"}, {}, before.machine)
    assert made.access_token != before.access_token
    assert made.sandbox_id != source


async def test_the_same_name_again_is_a_new_build_of_the_same_template(client: httpx.AsyncClient):
    source = await create(client)
    first, second = [await snap(client, source, name="mine") for _ in range(2)]
    assert first == second
    tagged = await snap(client, source, name="mine:v2")
    detail = (await client.get("/templates/mine")).json()
    assert detail["buildCount"] == 3
    assert len(detail["builds"]) == 2
    assert sorted(await listed(client)) == sorted([first["snapshotID"], tagged["snapshotID"]])


async def test_the_list_filters_and_pages(client: httpx.AsyncClient, clock: ManualClock):
    one, other = await create(client), await create(client)
    taken = []
    for n in range(7):
        taken.append((await snap(client, one if n % 2 else other, **({"name": f"s-{n}:x__asc"} if n < 5 else {})))["snapshotID"])
        clock.advance_ms(n % 3)  # some in the same millisecond
    assert sorted(await listed(client)) == sorted(taken)
    assert sorted(await listed(client, sandboxID=one)) == sorted(taken[1::2])
    assert sorted(await listed(client, sandboxID=f"{one}-client")) == sorted(taken[1::2])
    assert await listed(client, sandboxID="inothere") == []
    for name in ("s-2", "local/s-2", "S-2:x__asc"):
        assert await listed(client, name=name) == [taken[2]]
    assert await listed(client, name=taken[6].partition(":")[0]) == [taken[6]]
    for name in ("s-9", "s-2:other", "team/s-2", "base"):
        assert await listed(client, name=name) == []
    seen: list[str] = []
    token = ""
    while True:
        response = await client.get("/snapshots", params={"limit": 2, **({"nextToken": token} if token else {})})
        assert len(response.json()) in (1, 2)
        seen += [item["snapshotID"] for item in response.json()]
        token = response.headers.get("x-next-token", "")
        if not token:
            break
    assert seen == await listed(client)
    assert len(seen) == len(set(seen)) == 7


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "nextToken=x", "name=a/b/c"])
async def test_a_bad_query_is_refused(query: str, client: httpx.AsyncClient):
    assert (await client.get(f"/snapshots?{query}")).status_code == 400


async def test_snapshots_are_not_among_the_templates(client: httpx.AsyncClient):
    source = await create(client)
    await snap(client, source, name="mine")
    for path in ("/templates", "/v2/templates", "/default-templates"):
        assert ["mine"] not in [item["aliases"] for item in (await client.get(path)).json()]
    assert (await client.get("/templates/mine")).json()["names"] == ["local/mine"]


@pytest.mark.parametrize("name", [None, "mine", "mine:v1"])
async def test_a_second_delete_is_404(name: str | None, client: httpx.AsyncClient):
    source = await create(client)
    snapshot = await snap(client, source, **({} if name is None else {"name": name}))
    first, second = [await delete(client, snapshot["snapshotID"]) for _ in range(2)]
    assert (first.status_code, first.content) == (204, b"")
    assert second.status_code == second.json()["code"] == 404
    assert await listed(client) == []
    assert (await client.post("/v2/sandboxes", json={"templateID": snapshot["snapshotID"]})).status_code == 404


async def test_a_delete_with_a_tag_leaves_the_other_tags(client: httpx.AsyncClient):
    source = await create(client)
    for tag in ("default", "v1", "v2"):
        await snap(client, source, name=f"mine:{tag}")
    assert (await delete(client, "local/mine:v1")).status_code == 204
    assert (await delete(client, "local/mine:v1")).status_code == 404
    assert sorted(await listed(client)) == ["local/mine:default", "local/mine:v2"]
    assert (await delete(client, "mine")).status_code == 204
    assert await listed(client) == []


async def test_what_is_in_use_is_not_deleted(client: httpx.AsyncClient):
    source = await create(client)
    snapshot = (await snap(client, source, name="mine"))["snapshotID"]
    made = await create(client, templateID=snapshot)
    for _ in range(2):  # running, then paused
        response = await delete(client, snapshot)
        assert response.status_code == response.json()["code"] == 400
        assert made in response.json()["message"]
        await client.post(f"/sandboxes/{made}/pause")
    await snap(client, source, name="mine:other")
    assert (await delete(client, "mine:other")).status_code == 204, "nothing was made from that build"
    await client.delete(f"/sandboxes/{made}")
    assert (await delete(client, snapshot)).status_code == 204
    assert (await client.get(f"/sandboxes/{source}")).status_code == 200


async def test_a_paused_source_is_served_and_stays_paused(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    source = await create(client)
    await client.post(f"/sandboxes/{source}/pause")
    snapshot = await snap(client, source)
    assert orchestrator.peek(source).state == "paused"
    assert (await client.post("/v2/sandboxes", json={"templateID": snapshot["snapshotID"]})).status_code == 201


async def test_a_snapshot_outlives_its_source(client: httpx.AsyncClient):
    source = await create(client)
    snapshot = await snap(client, source)
    await client.delete(f"/sandboxes/{source}")
    assert await listed(client, sandboxID=source) == [snapshot["snapshotID"]]
    assert (await client.post("/v2/sandboxes", json={"templateID": snapshot["snapshotID"]})).status_code == 201


async def test_errors(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    assert (await client.post("/sandboxes/nonexistingsandbox/snapshots", json={})).status_code == 404
    source = await create(client)
    assert (await client.post(f"/sandboxes/{source}/snapshots", json={"name": 5})).status_code == 400
    orchestrator.fail_next("snapshot", StorageFull("no room"))
    assert (await client.post(f"/sandboxes/{source}/snapshots", json={"name": "mine"})).status_code == 507
    assert orchestrator.peek(source).state == "running"
    assert await listed(client) == []
    assert (await snap(client, source, name="mine"))["names"] == ["local/mine:default"]


async def test_while_it_is_taken_the_source_counts_as_running(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    source = await create(client)
    with orchestrator.hold("snapshot") as arrived:
        taking = asyncio.create_task(client.post(f"/sandboxes/{source}/snapshots"))
        await arrived.wait()
        assert orchestrator.peek(source).state == "snapshotting"
        assert (await client.get(f"/sandboxes/{source}")).json()["state"] == "running"
        assert (await client.delete(f"/sandboxes/{source}")).status_code == 204
    assert (await taking).status_code == 404
    assert await listed(client) == []
