"""Administration of templates through the API: tags, builds, publishing, the end."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote
from uuid import UUID

import httpx
import pytest

from agentenv.testing.fake_orchestrator import ManualClock


@pytest.fixture
async def source(client: httpx.AsyncClient) -> str:
    return (await client.post("/v2/sandboxes", json={"templateID": "base"})).json()["sandboxID"]


async def snap(client: httpx.AsyncClient, source: str, name: str) -> None:
    assert (await client.post(f"/sandboxes/{source}/snapshots", json={"name": name})).status_code == 201


async def assign(client: httpx.AsyncClient, target: str, *tags: str) -> httpx.Response:
    return await client.post("/templates/tags", json={"target": target, "tags": tags})


async def remove(client: httpx.AsyncClient, name: str, *tags: str) -> httpx.Response:
    return await client.request("DELETE", "/templates/tags", json={"name": name, "tags": tags})


async def tags(client: httpx.AsyncClient, name: str) -> dict[str, str]:
    response = await client.get(f"/templates/{quote(name, safe='')}/tags")
    assert response.status_code == 200, response.text
    for tag in response.json():
        assert set(tag) == {"tag", "buildID", "createdAt"}
        UUID(tag["buildID"])
    return {tag["tag"]: tag["buildID"] for tag in response.json()}


async def test_tags_are_given_listed_moved_and_taken(client: httpx.AsyncClient, source: str):
    await snap(client, source, "mine")
    [first] = (await tags(client, "mine")).values()
    given = await assign(client, "mine", "V1", "local/mine:stable", "v1")
    assert (given.status_code, given.json()) == (201, {"tags": ["v1", "stable"], "buildID": first})
    await snap(client, source, "mine")
    now = await tags(client, "local/mine:v1")
    second = now["default"]
    assert list(now) == ["default", "stable", "v1"]
    assert now == {"default": second, "v1": first, "stable": first}
    assert second != first
    assert (await assign(client, f"mine:{first}", "default")).json() == {"tags": ["default"], "buildID": first}
    assert (await assign(client, "mine:v1", "old")).json()["buildID"] == first
    assert set((await tags(client, "mine")).values()) == {first}, "the build without a tag is gone"
    assert (await assign(client, f"mine:{second}", "back")).status_code == 404
    assert (await remove(client, "local/mine", "v1", "OLD")).status_code == 204
    assert list(await tags(client, "mine")) == ["default", "stable"]
    assert (await client.post("/v2/sandboxes", json={"templateID": "mine:v1"})).status_code == 404
    assert (await client.post("/v2/sandboxes", json={"templateID": "mine:stable"})).status_code == 201


async def test_what_cannot_be_tagged(client: httpx.AsyncClient, source: str):
    await snap(client, source, "mine:v1")
    await snap(client, source, "other")
    for target in ("none", "mine", "mine:v2", "team/mine:v1"):
        assert (await assign(client, target, "x")).status_code == 404, target
    for target in ("", ":v1", "mine:", "a/b/c"):
        assert (await assign(client, target, "x")).status_code == 400, target
    for tag in ("", ":x", "mine:", "other:x", "team/mine:x", "a b", "6b5a0a06-9c2c-4b5e-8a43-0e5f5b1f8f6b"):
        assert (await assign(client, "mine:v1", tag)).status_code == 400, tag
    assert (await assign(client, "mine:v1")).status_code == 400
    assert (await assign(client, "mine:v1", *[f"t{n}" for n in range(101)])).status_code == 400
    assert (await assign(client, "mine:v1", *[f"t{n}" for n in range(100)])).status_code == 429
    assert list(await tags(client, "mine")) == ["v1"]


async def test_what_cannot_be_untagged(client: httpx.AsyncClient, source: str):
    await snap(client, source, "mine")
    await assign(client, "mine", "v1")
    assert (await remove(client, "mine", "default")).status_code == 400
    assert (await remove(client, "mine", "v1", "default")).status_code == 400
    assert (await remove(client, "mine", "v1", "v2")).status_code == 404
    assert (await remove(client, "none", "v1")).status_code == 404
    assert (await remove(client, "mine:v1", "v1")).status_code == 400
    assert (await remove(client, "mine")).status_code == 400
    assert list(await tags(client, "mine")) == ["default", "v1"], "a refused call took nothing"


async def test_a_template_ends_with_its_last_tag(client: httpx.AsyncClient, source: str):
    await snap(client, source, "mine:v1")
    assert (await client.get("/templates/mine")).status_code == 200, "a template without the tag default is found by its name"
    assert (await client.get("/templates/aliases/mine")).status_code == 200
    assert (await remove(client, "mine", "v1")).status_code == 204
    assert (await client.get("/templates/mine")).status_code == 404
    assert (await client.get("/snapshots")).json() == []


async def test_count_and_exists(client: httpx.AsyncClient, source: str):
    await snap(client, source, "mine")
    await assign(client, "mine", "v1", "v2")
    assert (await client.get("/templates/mine/tags/count")).json() == {"total": 3}
    assert (await client.get("/templates/mine/tags/exists?tag=%20V1")).json() == {"exists": True, "normalizedTag": "v1"}
    assert (await client.get("/templates/mine/tags/exists?tag=v3")).json() == {"exists": False, "normalizedTag": "v3"}
    assert (await client.get("/templates/mine/tags/exists?tag=a/b")).status_code == 400
    assert (await client.get("/templates/mine/tags/exists")).status_code == 400
    for path in ("tags", "tags/count", "tags/exists?tag=x", "tags/groups", "tags/default/assignments"):
        assert (await client.get(f"/templates/none/{path}")).status_code == 404, path


async def test_assignments_are_remembered_newest_first(client: httpx.AsyncClient, source: str, clock: ManualClock):
    builds = []
    for _ in range(5):
        await snap(client, source, "mine")
        builds.append((await tags(client, "mine"))["default"])
        clock.advance_ms(1000)
    page = (await client.get("/templates/mine/tags/default/assignments?limit=2")).json()
    assert [event["buildId"] for event in page["data"]] == builds[:2:-1]
    assert set(page["data"][0]) == {"assignmentId", "buildId", "assignedAt", "buildCreatedAt", "buildFinishedAt"}
    rest = (await client.get("/templates/mine/tags/default/assignments", params={"cursor": page["nextCursor"]})).json()
    assert [event["buildId"] for event in rest["data"]] == builds[2::-1]
    assert rest["nextCursor"] is None
    assert (await client.get("/templates/mine/tags/none/assignments")).status_code == 404
    assert (await client.get("/templates/mine/tags/a%20b/assignments")).status_code == 404
    assert (await client.get("/templates/mine/tags/default/assignments?cursor=%00")).status_code == 400
    assert (await client.get("/templates/mine/tags/default/assignments?limit=0")).status_code == 400


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("name_asc", ["alpha", "beta__asc", "default", "gamma"]),
        ("name_desc", ["gamma", "default", "beta__asc", "alpha"]),
        ("latest_asc", ["default", "gamma", "beta__asc", "alpha"]),
        ("latest_desc", ["alpha", "beta__asc", "gamma", "default"]),
    ],
)
async def test_groups_sort_search_and_page(sort: str, names: list[str], client: httpx.AsyncClient, source: str, clock: ManualClock):
    await snap(client, source, "mine")
    for name in ("gamma", "beta__asc", "alpha"):
        clock.advance_ms(1000)
        await assign(client, "mine", name)
    seen: list[str] = []
    cursor = None
    while True:
        query: dict[str, Any] = {"sort": sort, "tagsLimit": 1, "assignmentLimit": 1} | ({"tagsCursor": cursor} if cursor else {})
        page = (await client.get("/templates/mine/tags/groups", params=query)).json()
        seen += [group["tag"] for group in page["tags"]]
        cursor = page["nextCursor"]
        if cursor is None:
            break
    assert seen == names
    found = (await client.get("/templates/mine/tags/groups?search=%20A__")).json()
    assert [(group["tag"], len(group["assignments"]), group["hasMore"]) for group in found["tags"]] == [("beta__asc", 1, False)]


async def test_groups_tell_that_there_is_more(client: httpx.AsyncClient, source: str):
    for _ in range(4):
        await snap(client, source, "mine")
    [group] = (await client.get("/templates/mine/tags/groups?assignmentLimit=3")).json()["tags"]
    assert (len(group["assignments"]), group["hasMore"]) == (3, True)
    [group] = (await client.get("/templates/mine/tags/groups")).json()["tags"]
    assert (len(group["assignments"]), group["hasMore"]) == (4, False)


async def test_builds_come_in_pages(client: httpx.AsyncClient, source: str):
    for n in range(5):  # all in one millisecond
        await snap(client, source, f"mine:v{n}")
    whole = (await client.get("/templates/mine")).json()["builds"]
    seen, token = [], ""
    while True:
        response = await client.get("/templates/mine", params={"limit": 2} | ({"nextToken": token} if token else {}))
        seen += response.json()["builds"]
        token = response.headers.get("x-next-token", "")
        if not token:
            break
    assert seen == whole
    assert len({build["buildID"] for build in seen}) == 5


@pytest.mark.parametrize("reference", ["base", "base:default", "local/base"])
async def test_the_nodes_own_template_stays(reference: str, client: httpx.AsyncClient, source: str):
    path = f"/templates/{quote(reference, safe='')}"
    await client.delete(f"/sandboxes/{source}")
    response = await client.delete(path)
    assert response.status_code == 400
    assert "node's own" in response.json()["message"]
    assert "template delete base:TAG" in response.json()["message"]  # what can be done instead
    assert (await assign(client, "base", "pinned")).status_code == 201
    assert (await client.delete("/templates/base%3Apinned")).status_code == 204
    assert (await client.get(path)).status_code == 200
    assert [item["aliases"] for item in (await client.get("/default-templates")).json()] == [["python"], ["base"]]


async def test_publishing_is_noted(client: httpx.AsyncClient, source: str):
    await snap(client, source, "mine")
    assert (await client.patch("/v2/templates/local%2Fmine", json={"public": True})).json() == {"names": ["local/mine"]}
    assert (await client.get("/templates/mine")).json()["public"] is True
    assert (await client.get("/templates/aliases/mine")).json()["public"] is True
    assert (await client.patch("/v2/templates/mine", json={})).json() == {"names": ["local/mine"]}
    assert (await client.get("/templates/mine")).json()["public"] is True
    assert (await client.patch("/templates/mine", json={"public": False})).status_code == 200
    assert (await client.get("/templates/mine")).json()["public"] is False
    assert (await client.patch("/v2/templates/base", json={"public": True})).json() == {"names": ["base"]}
    assert (await client.patch("/v2/templates/none", json={"public": True})).status_code == 404
    assert (await client.patch("/v2/templates/mine", json={"public": "yes"})).status_code == 400


async def test_aliases(client: httpx.AsyncClient, source: str):
    await snap(client, source, "mine:v1")
    template_id = (await client.get("/templates/mine")).json()["templateID"]
    for name in ("mine", "MINE", "local/mine", "mine:v1", template_id):
        found = await client.get(f"/templates/aliases/{quote(name, safe='')}")
        assert (found.status_code, found.json()["templateID"]) == (200, template_id), name
    for name in ("other", "mine:v2", "team/mine", "a/b/c", ""):
        assert (await client.get(f"/templates/aliases/{quote(name, safe='')}")).status_code in (404, 405), name


async def test_use_is_told(client: httpx.AsyncClient, source: str, clock: ManualClock):
    before = (await client.get("/templates/python")).json()
    assert (before["spawnCount"], before["lastSpawnedAt"]) == (0, None)
    clock.advance_ms(5000)
    await client.post("/v2/sandboxes", json={"templateID": "python"})
    after = (await client.get("/templates/python")).json()
    assert after["spawnCount"] == 1
    assert after["lastSpawnedAt"].startswith("20")


async def test_one_team_for_either_way_of_sending_the_key(client: httpx.AsyncClient, stranger: httpx.AsyncClient, key: str):
    by_key = await client.get("/teams")
    by_token = await stranger.get("/teams", headers={"Authorization": f"Bearer {key}"})
    assert by_key.json() == by_token.json()
    [team] = by_key.json()
    UUID(team["teamID"])
    assert (team["apiKey"], team["isDefault"]) == (key, True)
    assert (await stranger.get("/teams")).status_code == 401


async def test_sandboxes_are_listed_by_any_form_of_their_templates_name(client: httpx.AsyncClient, source: str):
    for name in ("base", "BASE ", "local/base"):
        assert [item["sandboxID"] for item in (await client.get("/v2/sandboxes", params={"template": name})).json()] == [source], name
    assert (await client.get("/v2/sandboxes", params={"template": "team/base"})).json() == []
    assert (await client.get("/v2/sandboxes", params={"template": "a b"})).status_code == 400
