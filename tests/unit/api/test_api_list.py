"""Reading and listing: fields, filters before limits, order, pages."""

from __future__ import annotations

from datetime import datetime
from urllib.parse import quote, urlencode

import httpx
import pytest
from api_rig import create

from agentenv.testing.fake_orchestrator import FakeOrchestrator, ManualClock

LISTED = {
    "templateID",
    "alias",
    "sandboxID",
    "clientID",
    "startedAt",
    "endAt",
    "envdVersion",
    "cpuCount",
    "memoryMB",
    "diskSizeMB",
    "state",
    "metadata",
    "volumeMounts",
}


async def ids(client: httpx.AsyncClient, query: str = "") -> list[str]:
    response = await client.get(f"/v2/sandboxes{query}")
    assert response.status_code == 200, response.text
    return [item["sandboxID"] for item in response.json()]


def metadata_query(**metadata: str) -> str:
    return "?" + urlencode({"metadata": urlencode({quote(key): quote(value) for key, value in metadata.items()})})


async def test_detail(client: httpx.AsyncClient, orchestrator: FakeOrchestrator, clock: ManualClock):
    sandbox_id = await create(client, metadata={"a": "b"}, timeout=60, autoPause=True, allow_internet_access=False)
    detail = (await client.get(f"/sandboxes/{sandbox_id}")).json()
    assert set(detail) == LISTED | {"envdAccessToken", "allowInternetAccess", "domain", "network", "lifecycle"}
    assert detail["state"] == "running"
    assert detail["metadata"] == {"a": "b"}
    assert detail["lifecycle"] == {"autoResume": False, "onTimeout": "pause"}
    assert detail["allowInternetAccess"] is False
    assert detail["envdAccessToken"] == orchestrator.peek(sandbox_id).access_token
    started, ends = (datetime.fromisoformat(detail[name]) for name in ("startedAt", "endAt"))
    assert started.timestamp() * 1000 == clock.now_ms()
    assert (ends - started).total_seconds() == 60


async def test_pause_mode_appears_once_paused(client: httpx.AsyncClient):
    sandbox_id = await create(client)
    assert (await client.post(f"/sandboxes/{sandbox_id}/pause")).status_code == 204
    detail = (await client.get(f"/sandboxes/{sandbox_id}")).json()
    assert (detail["state"], detail["pauseMode"]) == ("paused", "full")


async def test_lists_have_no_secrets(client: httpx.AsyncClient):
    await create(client, network={"allowPublicTraffic": False})
    for path in ("/sandboxes", "/v2/sandboxes"):
        (item,) = (await client.get(path)).json()
        assert set(item) == LISTED


async def test_metadata_filter(client: httpx.AsyncClient):
    both = await create(client, metadata={"a b": "c&d", "user": "x=y"})
    await create(client, metadata={"a b": "c&d"})
    await create(client)
    assert len(await ids(client, metadata_query(**{"a b": "c&d"}))) == 2
    assert await ids(client, metadata_query(**{"a b": "c&d", "user": "x=y"})) == [both]
    assert await ids(client, metadata_query(user="nobody")) == []
    running = await client.get("/sandboxes" + metadata_query(user="x=y"))
    assert [item["sandboxID"] for item in running.json()] == [both]
    assert running.headers["x-total-running"] == "1"


async def test_state_filter(client: httpx.AsyncClient):
    running, paused = await create(client), await create(client)
    await client.post(f"/sandboxes/{paused}/pause")
    assert await ids(client, "?state=running") == [running]
    assert await ids(client, "?state=paused") == [paused]
    for both in ("", "?state=", "?state=running,paused", "?state=running%2Cpaused", "?state=running&state=paused"):
        assert sorted(await ids(client, both)) == sorted([running, paused])
    response = await client.get("/v2/sandboxes?state=paused")
    assert response.headers["x-total-running"] == "1"
    assert [item["sandboxID"] for item in (await client.get("/sandboxes")).json()] == [running]


async def test_template_filter(client: httpx.AsyncClient):
    base = await create(client)
    python = await create(client, templateID="python")
    python_id = (await client.get("/templates/python")).json()["templateID"]
    assert await ids(client, "?template=base") == [base]
    assert await ids(client, f"?template={python_id}") == [python]
    assert await ids(client, "?template=unknown") == []
    assert (await client.get("/v2/sandboxes?template=base%3Adefault")).status_code == 400


async def test_started_after_is_inclusive(client: httpx.AsyncClient, clock: ManualClock):
    first = await create(client)
    clock.advance_ms(1)
    second = await create(client)
    first_at, second_at = [(await client.get(f"/sandboxes/{item}")).json()["startedAt"] for item in (first, second)]
    assert sorted(await ids(client, f"?startedAfter={first_at}")) == sorted([first, second])
    assert await ids(client, f"?startedAfter={second_at}") == [second]
    just_after_first = first_at.replace("Z", "001Z")
    assert await ids(client, f"?startedAfter={just_after_first}") == [second]
    assert await ids(client, f"?startedAfter={second_at.replace('Z', '999Z')}") == []


async def test_order_and_equal_start_times(client: httpx.AsyncClient, clock: ManualClock):
    created = []
    for step_ms in (0, 0, 5, 5, 0):
        clock.advance_ms(step_ms)
        created.append(await create(client))
    descending, ascending = await ids(client), await ids(client, "?order=asc")
    assert ascending == descending[::-1]
    assert sorted(descending) == sorted(created)
    assert set(ascending[:2]) == set(created[:2])


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages(order: str, client: httpx.AsyncClient, clock: ManualClock):
    for index in range(7):
        clock.advance_ms(index % 2)
        sandbox_id = await create(client, metadata={"even": str(index % 2)})
        if index % 3 == 0:
            await client.post(f"/sandboxes/{sandbox_id}/pause")
    whole = await ids(client, f"?order={order}")
    pages, query = [], f"?limit=3&order={order}"
    while query:
        response = await client.get(f"/v2/sandboxes{query}")
        assert response.headers["x-total-running"] == "4"
        pages.append([item["sandboxID"] for item in response.json()])
        token = response.headers.get("x-next-token")
        query = f"?limit=3&nextToken={quote(token)}" if token else ""
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [item for page in pages for item in page] == whole


async def test_no_token_when_the_page_is_just_full(client: httpx.AsyncClient):
    for _ in range(2):
        await create(client)
    assert "x-next-token" not in (await client.get("/v2/sandboxes?limit=2")).headers


async def test_more_than_a_page_runs(client: httpx.AsyncClient):
    for _ in range(103):
        await create(client)
    response = await client.get("/v2/sandboxes")
    assert (len(response.json()), response.headers["x-total-running"]) == (100, "103")
    assert len((await client.get("/sandboxes")).json()) == 103


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=x", "limit"),
        ("state=sleeping", "state"),
        ("order=up", "order"),
        ("startedAfter=yesterday", "startedAfter"),
        ("nextToken=@@@", "nextToken"),
        ("nextToken=bm90aGluZw", "page"),
        ("metadata=novalue", "metadata"),
        ("metadata=a%3D%25ZZ", "metadata"),
    ],
)
async def test_bad_queries_are_named(query: str, named: str, client: httpx.AsyncClient):
    response = await client.get(f"/v2/sandboxes?{query}")
    assert response.status_code == 400
    assert named in response.json()["message"]


async def test_templates(client: httpx.AsyncClient):
    newest_first = (await client.get("/templates")).json()
    assert [item["names"] for item in newest_first] == [["python"], ["base"]]
    required = "templateID buildID cpuCount memoryMB diskSizeMB public aliases names createdAt updatedAt createdBy lastSpawnedAt"
    assert set(newest_first[0]) == {*required.split(), "spawnCount", "buildCount", "envdVersion", "buildStatus"}
    first = await client.get("/v2/templates?limit=1")
    second = await client.get(f"/v2/templates?limit=1&nextToken={first.headers['x-next-token']}")
    assert first.json() + second.json() == newest_first
    assert "x-next-token" not in second.headers


async def test_one_template(client: httpx.AsyncClient):
    detail = (await client.get("/templates/base")).json()
    assert detail["builds"][0]["buildID"] == detail["buildID"]
    for reference in (detail["templateID"], "base%3Adefault", "BASE"):
        assert (await client.get(f"/templates/{reference}")).json() == detail
    assert (await client.get("/templates/aliases/base")).json() == {"templateID": detail["templateID"], "public": False}
    for path in ("/templates/none", "/templates/aliases/none", "/templates/base%3Aother", "/templates/team%2Fbase", "/templates/%00"):
        assert (await client.get(path)).status_code == 404


async def test_spawns_are_counted(client: httpx.AsyncClient):
    await create(client)
    await create(client)
    assert (await client.get("/templates/base")).json()["spawnCount"] == 2
