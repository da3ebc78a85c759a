"""Every failure has the contract's one shape, and says whether repeating helps."""

from __future__ import annotations

import logging

import httpx
import pytest
from fastapi import FastAPI

from agentenv.api.app import create_app
from agentenv.api.auth import KeyRing
from agentenv.api.errors import error_table
from agentenv.api.routes import health, unbuilt
from agentenv.api.settings import ApiSettings
from agentenv.core.errors import AgentEnvError, Conflict, LimitReached, all_errors
from agentenv.testing.fake_orchestrator import FakeOrchestrator, ManualClock, make_template

APP = create_app(FakeOrchestrator(ManualClock(), [make_template("base")]), KeyRing(["e2b_" + "1" * 40]), ApiSettings("sandbox.test"))
KEYED_ROUTES = [
    (method, route.path)
    for route in APP.state.error_routes
    if route.path != "/health" and not route.path.startswith(("/volumecontent/", "/template-files/"))  # which ask for tokens of their own
    for method in sorted(route.methods)
]


def assert_contract_error(response: httpx.Response, status: int, error_code: str) -> str:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"code", "message", "error_code"}
    assert body["code"] == status
    assert body["error_code"] == error_code
    assert isinstance(body["message"], str)
    assert body["message"]
    return body["message"]


@pytest.mark.parametrize("cls", all_errors())
async def test_every_class_of_error(cls: type[AgentEnvError], client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    orchestrator.fail_next("create", cls("the cause", "the next step"))
    response = await client.post("/v2/sandboxes", json={"templateID": "base"})
    assert assert_contract_error(response, cls.status, cls.code) == "the cause\nthe next step"
    assert response.headers.get("should-retry") == (None if cls.retryable else "false")
    assert response.headers.get("retry-after") == ("1" if cls.retryable and cls.status in (429, 503) else None)


def test_the_table_holds_every_code_once():
    codes = [cls.code for cls in all_errors() if cls is not AgentEnvError]
    assert len(codes) == len(set(codes))
    assert error_table() == {cls.code: cls.status for cls in all_errors()}


async def test_an_error_without_hint_is_one_line(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    orchestrator.fail_next("create", Conflict("the cause"))
    assert (await client.post("/v2/sandboxes", json={"templateID": "base"})).json()["message"] == "the cause"


@pytest.mark.parametrize(("method", "path"), KEYED_ROUTES)
@pytest.mark.parametrize("headers", [{}, {"X-API-KEY": "e2b_" + "1" * 40}, {"Authorization": "Bearer nonsense"}])
async def test_every_route_wants_a_key(method: str, path: str, headers: dict[str, str], stranger: httpx.AsyncClient):
    # A body that is no JSON must not get an opinion before the key was checked.
    response = await stranger.request(method, path.replace("{", "").replace("}", ""), headers=headers, content=b"{")
    assert_contract_error(response, 401, "unauthenticated")
    assert response.headers["should-retry"] == "false"


def test_health_is_the_only_route_without_a_key(app: FastAPI):
    assert [route.path for route in health.router.routes] == ["/health"]
    assert len(KEYED_ROUTES) >= 20 + len(unbuilt.ROUTES)


async def test_health_tells_what_is_out_of_order(orchestrator: FakeOrchestrator, key: str):
    troubles: dict[str, str] = {}
    app = create_app(orchestrator, KeyRing([key]), ApiSettings("sandbox.test"), troubles=troubles)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api.test") as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        troubles["blockd"] = "the block server does not run"
        reply = await client.get("/health")
        assert reply.status_code == 200
        assert reply.json() == {"status": "degraded", "troubles": {"blockd": "the block server does not run"}}


@pytest.mark.parametrize(("method", "path"), unbuilt.ROUTES)
async def test_unbuilt_routes_say_so(method: str, path: str, client: httpx.AsyncClient):
    message = assert_contract_error(await client.request(method, path.replace("{", "").replace("}", "")), 501, "unsupported")
    assert message.startswith(f"{method} {path}:")


async def test_unknown_route(client: httpx.AsyncClient):
    assert "GET /v9/nothing" in assert_contract_error(await client.get("/v9/nothing"), 404, "not_found")


async def test_method_not_allowed(client: httpx.AsyncClient):
    response = await client.put("/sandboxes/abc")
    assert "PUT" in assert_contract_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "DELETE, GET"


@pytest.mark.parametrize("content", [b"{", b"[1", b"nonsense", b'{"templateID": NaN}', b"\xff\xfe", b"[" * 60_000])
async def test_malformed_json(content: bytes, client: httpx.AsyncClient):
    assert_contract_error(await client.post("/v2/sandboxes", content=content), 400, "invalid_input")


@pytest.mark.parametrize("content", [b"[]", b'"base"', b"3"])
async def test_json_that_is_no_object(content: bytes, client: httpx.AsyncClient):
    assert "object" in assert_contract_error(await client.post("/v2/sandboxes", content=content), 400, "invalid_input")


async def test_unexpected_exception_is_a_500_whose_id_is_logged(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
):
    orchestrator.fail_next("create", ZeroDivisionError("secret detail"))
    response = await client.post("/v2/sandboxes", json={"templateID": "base"})
    message = assert_contract_error(response, 500, "internal")
    request_id = response.headers["x-request-id"]
    assert request_id in message
    assert "secret detail" not in message
    assert response.headers["should-retry"] == "false"
    record = next(record for record in caplog.records if record.exc_info)
    assert request_id in record.getMessage()


async def test_fork_children_fail_alone(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    sandbox_id = (await client.post("/v2/sandboxes", json={"templateID": "base"})).json()["sandboxID"]
    orchestrator.fail_next("fork_child", LimitReached("full"))
    response = await client.post(f"/sandboxes/{sandbox_id}/fork", json={"count": 3})
    assert response.status_code == 201
    first, *others = response.json()
    assert first == {"error": {"code": 429, "message": "full"}}
    assert all(set(other) == {"sandbox"} for other in others)


async def test_request_log_has_no_secrets(client: httpx.AsyncClient, key: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "agentenv")
    response = await client.post("/v2/sandboxes?metadata=topsecret", json={"templateID": "base", "envVars": {"A": "hush"}})
    token = response.json()["envdAccessToken"]
    text = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records if record.name.startswith("agentenv"))
    assert "POST /v2/sandboxes 201" in text
    for secret in (key, token, "topsecret", "hush"):
        assert secret not in text


async def test_request_id_is_kept_when_sane(client: httpx.AsyncClient):
    assert (await client.get("/health", headers={"X-Request-Id": "trace-1.a_B"})).headers["x-request-id"] == "trace-1.a_B"
    assert (await client.get("/health", headers={"X-Request-Id": "two words"})).headers["x-request-id"] != "two words"
