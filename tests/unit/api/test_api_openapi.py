"""The OpenAPI document, and requests made from it: whatever arrives, the API answers in its own words."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from agentenv.api.app import create_app
from agentenv.api.auth import KeyRing
from agentenv.api.settings import ApiSettings
from agentenv.testing.fake_orchestrator import FakeOrchestrator, ManualClock, make_template

KEY = "e2b_" + "0123456789abcdef" * 2 + "01234567"
EXAMPLES = 10  # for each operation, of which there are more than 60


def make_app() -> FastAPI:
    return create_app(FakeOrchestrator(ManualClock(), [make_template("base")]), KeyRing([KEY]), ApiSettings("sandbox.test"))


APP = make_app()
schema = schemathesis.openapi.from_asgi("/openapi.json", APP, headers={"X-API-KEY": KEY})


def documented_operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [(method.upper(), path, operation) for path, methods in APP.openapi()["paths"].items() for method, operation in methods.items()]


def test_every_route_is_in_the_document():
    served = {(method, route.path) for route in APP.state.error_routes if isinstance(route, APIRoute) for method in route.methods}
    assert {(method, path) for method, path, _ in documented_operations()} == served - {("GET", "/openapi.json")}


@pytest.mark.parametrize(
    ("method", "path", "operation"), documented_operations(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_operation_tells_its_failures_and_its_credential(method: str, path: str, operation: dict[str, Any]):
    kind = "VolumeError" if path.startswith("/volumecontent/") else "Error"
    for family in ("4XX", "5XX"):
        assert operation["responses"][family]["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{kind}"}
    assert "422" not in operation["responses"]
    assert ("security" in operation) is (path != "/health")
    named = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
    assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}


@pytest.mark.parametrize(
    ("method", "path", "required"),
    [
        ("post", "/v2/sandboxes", ["templateID"]),
        ("post", "/sandboxes", ["templateID"]),
        ("post", "/sandboxes/{sandbox_id}/timeout", ["timeout"]),
        ("post", "/sandboxes/{sandbox_id}/pause", None),
    ],
)
def test_bodies_are_described(method: str, path: str, required: list[str] | None):
    document = APP.openapi()
    body = document["paths"][path][method]["requestBody"]
    assert body["required"] is bool(required)
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert document["components"]["schemas"][name].get("required") == required


def test_calls_of_volume_content_take_a_path():
    calls = [operation for _, path, operation in documented_operations() if path.startswith("/volumecontent/")]
    assert len(calls) == 7
    for operation in calls:
        (path,) = [parameter for parameter in operation["parameters"] if (parameter["in"], parameter["name"]) == ("query", "path")]
        assert path["required"] is True


def test_replies_are_described():
    document = APP.openapi()
    connect = document["paths"]["/v2/sandboxes/{sandbox_id}/connect"]["post"]["responses"]
    assert {status: connect[status]["content"]["application/json"]["schema"] for status in ("200", "201")} == {
        status: {"$ref": "#/components/schemas/SandboxView"} for status in ("200", "201")
    }
    listed = document["paths"]["/v2/sandboxes"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert listed["items"] == {"$ref": "#/components/schemas/ListedSandboxView"}


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_any_request_gets_an_answer_of_the_contract(case: schemathesis.Case):
    response = case.call()
    if response.status_code >= 400:
        assert response.status_code not in (500, 502, 503, 504), response.text
        assert response.headers["content-type"][0].startswith("application/json")
        body = json.loads(response.content)
        assert isinstance(body["message"], str)
        assert body["message"]
        in_volume = case.path.startswith("/volumecontent/")
        assert in_volume or body["code"] == response.status_code
        assert isinstance(body["code"], str if in_volume else int)
    case.validate_response(response, checks=[status_code_conformance, response_schema_conformance])
