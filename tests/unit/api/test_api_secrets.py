"""Secrets over HTTP and through the official SDK."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from e2b import AsyncSecret, Secret
from e2b.exceptions import SecretException, SecretNotFoundException

from agentenv.testing.fake_orchestrator import FakeOrchestrator, ManualClock

VALUE = "correct horse battery staple"
Options = dict[str, Any]


@pytest.fixture
def options(live_port: int, key: str) -> Options:
    return {"api_key": key, "api_url": f"http://127.0.0.1:{live_port}"}


def test_life_of_a_secret(options: Options):
    made = Secret.create("Api-Key", VALUE, metadata={"team": "a"}, **options)
    assert (made.name, made.version, made.metadata, made.created_at) == ("api-key", 1, {"team": "a"}, made.updated_at)
    assert made.secret_id.startswith("sec_")
    for reference in (made.secret_id, "api-key", "API-KEY"):
        assert Secret.get_info(reference, **options) == made
        assert Secret.exists(reference, **options)
    updated = Secret.update("api-key", "other", **options)
    assert (updated.version, updated.metadata) == (2, {"team": "a"})
    assert Secret.update(made.secret_id, "third", metadata={}, **options).metadata == {}
    with pytest.raises(SecretException, match="exists already"):
        Secret.create("api-key", VALUE, **options)
    assert Secret.destroy("api-key", **options)
    assert not Secret.destroy("api-key", **options)
    assert not Secret.exists(made.secret_id, **options)
    for attempt in (lambda: Secret.get_info("api-key", **options), lambda: Secret.update("api-key", VALUE, **options)):
        with pytest.raises(SecretNotFoundException):
            attempt()


async def test_names_that_need_encoding(client: httpx.AsyncClient):
    for name in ("team/key v1", "ü:%2f", "a?b#c"):
        await client.post("/secrets", json={"name": name, "value": VALUE})
        path = f"/secrets/{quote(name, safe='')}"
        assert (await client.get(path)).json()["name"] == name
        assert (await client.delete(path)).status_code == 204


def test_pages(options: Options):
    names = [Secret.create(f"k{number}", VALUE, **options).name for number in range(5)]
    paginator = Secret.list(limit=2, **options)
    seen: list[str] = []
    while paginator.has_next:
        items = paginator.next_items()
        assert 1 <= len(items) <= 2
        seen += [item.name for item in items]
    assert sorted(seen) == names


async def test_the_asynchronous_client(options: Options):
    made = await AsyncSecret.create("k", VALUE, **options)
    assert (await AsyncSecret.list(**options).next_items()) == [made]
    assert await AsyncSecret.destroy("k", **options)


async def test_a_value_is_in_no_answer_and_no_log(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    replies = [
        await client.post("/secrets", json={"name": "k", "value": VALUE}),
        await client.post("/secrets", json={"name": "k", "value": VALUE}),
        await client.post("/secrets", json={"name": "l", "value": VALUE, "metadata": {"a": 1}}),
        await client.post("/secrets", json={"name": "l", "value": [VALUE]}),
        await client.get("/secrets/k"),
        await client.get("/secrets"),
        await client.post("/secrets/k", json={"value": VALUE}),
        await client.delete("/secrets/k"),
    ]
    assert [reply.status_code for reply in replies] == [201, 409, 400, 400, 200, 200, 200, 204]
    assert VALUE not in caplog.text + "".join(reply.text for reply in replies)


async def test_newest_first(client: httpx.AsyncClient, clock: ManualClock):
    for name in ("a", "b", "c"):
        await client.post("/secrets", json={"name": name, "value": VALUE})
        clock.advance_ms(1)
    first = await client.get("/secrets?limit=2")
    assert [one["name"] for one in first.json()] == ["c", "b"]
    last = await client.get(f"/secrets?limit=2&nextToken={first.headers['x-next-token']}")
    assert ([one["name"] for one in last.json()], "x-next-token" in last.headers) == (["a"], False)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"value": "v"}, "name"),
        ({"name": "n"}, "value"),
        ({"name": "", "value": "v"}, "name"),
        ({"name": "sec_x", "value": "v"}, "name"),
        ({"name": "a}", "value": "v"}, "name"),
        ({"name": "n", "value": ""}, "value"),
        ({"name": "n", "value": "v", "metadata": {"k" * 129: ""}}, "metadata"),
        ({"name": "n", "value": "v", "metadata": []}, "metadata"),
    ],
)
async def test_what_is_refused(client: httpx.AsyncClient, body: dict[str, Any], named: str):
    reply = await client.post("/secrets", json=body)
    assert (reply.status_code, reply.json()["code"]) == (400, 400)
    assert named in reply.json()["message"]


@pytest.mark.parametrize(("method", "body"), [("GET", None), ("DELETE", None), ("POST", {"value": "v"})])
async def test_unknown_ones(client: httpx.AsyncClient, method: str, body: dict[str, str] | None):
    reply = await client.request(method, "/secrets/none", json=body)
    assert (reply.status_code, reply.json()["code"]) == (404, 404)
