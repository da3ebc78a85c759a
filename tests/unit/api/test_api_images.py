"""Images and layers over HTTP: lists, pulls and imports as lines of JSON, and how each fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from agentenv.core.errors import PermissionDenied
from agentenv.testing.fake_orchestrator import FakeOrchestrator
from agentenv.testing.fake_workshop import make_image

NAME = "docker.io/library/debian:12"


def lines(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


async def test_the_life_of_an_image(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    image = orchestrator.images.registry[NAME] = make_image(NAME, env=("A=1",), user="app", labels={"k": "v"})
    said = lines(await client.post("/images/pull", json={"name": NAME}))
    assert said[:-1] == [{"step": f"pull {NAME} (bytes)", "done": done, "total": 2000} for done in (0, 2000)]
    view = said[-1]["image"]
    assert view["config"] == {"Env": ["A=1"], "User": "app", "Labels": {"k": "v"}}
    assert (view["digest"], view["names"], view["sizeBytes"], view["platform"]) == (image.digest, [NAME], 2000, "linux/amd64")
    assert [layer["layerID"] for layer in view["layers"]] == ["image-base", "image-top"]
    for reference in (NAME, image.digest):
        assert (await client.get(f"/images/{quote(reference, safe='')}")).json() == view
    assert (await client.get("/images")).json() == [view]
    assert (await client.get("/layers")).json()[0] == {"layerID": "image-base", "sizeBytes": 1000, "users": [f"image {NAME}"]}
    assert (await client.delete(f"/images/{quote(NAME, safe='')}")).status_code == 204
    gone = await client.delete(f"/images/{quote(NAME, safe='')}")
    assert (gone.status_code, gone.json()["error_code"]) == (404, "not_found")


async def test_failures_before_and_after_the_first_line(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    missing = await client.post("/images/pull", json={"name": "none"})
    assert (missing.status_code, missing.json()["error_code"]) == (404, "not_found")
    orchestrator.images.registry[NAME] = PermissionDenied("the registry says no", "give credentials")
    said = lines(await client.post("/images/pull", json={"name": NAME}))
    assert said[-1] == {"error": {"code": 403, "message": "the registry says no\ngive credentials", "error_code": "permission_denied"}}


async def test_credentials_for_one_pull(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    orchestrator.images.registry[NAME] = make_image(NAME)
    for registry, status in (
        (None, 200),
        ({"type": "registry", "username": "u", "password": "p"}, 200),
        ({"type": "gcp", "serviceAccountJson": "{}"}, 200),
        ({"type": "registry", "username": "u"}, 400),
        ({"type": "other"}, 400),
        ({"type": "aws", "awsAccessKeyId": "a", "awsSecretAccessKey": "b", "awsRegion": "c"}, 200),
    ):
        body = {"name": NAME} | ({"registry": registry} if registry else {})
        assert (await client.post("/images/pull", json=body)).status_code == status, registry
    assert [account and account.kind for account in orchestrator.images.pulled_with] == [None, "registry", "gcp", "aws"]


@pytest.mark.parametrize("body", [{}, {"name": ""}, {"name": "x" * 2000}, {"name": 3}])
async def test_a_pull_needs_a_name(body: dict[str, object], client: httpx.AsyncClient):
    assert (await client.post("/images/pull", json=body)).status_code == 400


async def test_an_image_in_the_body_may_be_larger_than_other_bodies(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"z" * 10_000

    said = lines(await client.post("/images/import", params={"name": "mine:1"}, content=chunks()))
    assert said[-1]["image"]["names"] == ["mine:1"]
    assert orchestrator.images.received == [b"z" * 500_000]
    assert (await client.post("/images/import", content=b"")).status_code == 400


async def test_a_caller_that_leaves_does_not_end_the_pull(live_port: int, live_orchestrator: FakeOrchestrator, key: str):
    ended = asyncio.Event()

    async def pull(name: str, credentials: object, progress: Any) -> Any:
        try:
            progress("one", None, None)
            await asyncio.sleep(60)
        finally:
            live_orchestrator.images.received.append(b"told")
            ended.set()

    live_orchestrator.images.pull = pull  # type: ignore[method-assign, assignment]
    async with (
        httpx.AsyncClient(headers={"X-API-KEY": key}) as client,
        client.stream("POST", f"http://127.0.0.1:{live_port}/images/pull", json={"name": NAME}) as reply,
    ):
        assert json.loads(await anext(reply.aiter_lines()))["step"] == "one"
    for _ in range(200):  # the request's own task ends, and with it its wait: the work itself is the library's
        if live_orchestrator.images.received:
            break
        await asyncio.sleep(0.02)
    assert live_orchestrator.images.received == [b"told"]


async def test_a_key_is_asked_for(stranger: httpx.AsyncClient):
    for method, path in (("GET", "/images"), ("GET", "/layers"), ("POST", "/images/pull"), ("DELETE", "/images/x")):
        assert (await stranger.request(method, path)).status_code == 401


async def test_a_template_is_pushed(client: httpx.AsyncClient):
    registry = {"type": "registry", "username": "u", "password": "p"}
    said = lines(await client.post("/templates/base/push", json={"name": "r/denied:1", "registry": registry}))
    assert said[0] == {"step": "pack the layers", "done": 1, "total": 1}
    pushed = said[-1]["image"]
    assert (pushed["reference"], pushed["sizeBytes"], len(pushed["layers"])) == ("r/denied:1", 2000, 1)
    said = lines(await client.post("/templates/base/push", json={"name": "r/denied:1"}))
    assert said[-1]["error"]["error_code"] == "permission_denied"
    missing = await client.post("/templates/nothing/push", json={"name": "r/x"})
    assert (missing.status_code, missing.json()["error_code"]) == (404, "not_found")
    assert (await client.post("/templates/base/push", json={})).status_code == 400
