"""Creating: defaults, validation, what is refused by name, and the reply."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from test_api_errors import assert_contract_error

from agentenv.api.models import MAX_ENV_VAR_BYTES, MAX_METADATA_BYTES, CreateBody
from agentenv.core.model import CreateRequest, Sandbox
from agentenv.core.quotas import Quotas
from agentenv.testing.fake_orchestrator import FakeOrchestrator

V1, V2 = "/sandboxes", "/v2/sandboxes"


async def test_reply_has_the_contracts_fields(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    response = await client.post(V2, json={"templateID": "base"})
    assert response.status_code == 201
    body = response.json()
    stored = orchestrator.peek(body["sandboxID"])
    assert body == {
        "templateID": stored.template_id,
        "sandboxID": stored.sandbox_id,
        "clientID": "local",
        "envdVersion": stored.envd_version,
        "alias": "base",
        "envdAccessToken": stored.access_token,
        "trafficAccessToken": None,
        "domain": "sandbox.test:3000",
    }
    assert len(stored.access_token) == 64


@pytest.mark.parametrize(("path", "timeout_s"), [(V2, 300), (V1, 15)])
async def test_defaults(path: str, timeout_s: int, client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    stored = orchestrator.peek((await client.post(path, json={"templateID": "base"})).json()["sandboxID"])
    assert (stored.timeout_s, stored.on_timeout, stored.auto_resume) == (timeout_s, "kill", False)
    assert (stored.allow_public_traffic, stored.allow_internet_access, stored.metadata, stored.env_vars) == (True, None, {}, {})


async def test_everything_that_can_be_asked(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    body = {
        "templateID": " Base:default ",
        "timeout": 60,
        "autoPause": True,
        "autoPauseMemory": True,
        "autoResume": {"enabled": True},
        "allow_internet_access": False,
        "network": {"allowPublicTraffic": False, "allowOut": [], "egressProxy": None},
        "metadata": {"a": "b"},
        "envVars": {"A": "=1"},
        "mcp": None,
        "iam": {"tokens": {}},
        "volumeMounts": [],
        "limits": {"cpuPercent": 50, "diskBytesPerSecond": 1048576, "diskOperationsPerSecond": 100, "networkBytesPerSecond": 65536},
        "diskSizeMB": 16384,
        "surprise": 1,
    }
    reply = (await client.post(V2, json=body)).json()
    stored = orchestrator.peek(reply["sandboxID"])
    assert (stored.timeout_s, stored.on_timeout, stored.auto_resume) == (60, "pause", True)
    assert (stored.allow_public_traffic, stored.allow_internet_access) == (False, False)
    assert (stored.metadata, stored.env_vars) == ({"a": "b"}, {"A": "=1"})
    assert stored.machine.disk_mb == 16384
    assert stored.quotas == Quotas(50, 1 << 20, 100, 1 << 16)
    assert reply["trafficAccessToken"] == stored.traffic_token
    assert stored.traffic_token not in (None, stored.access_token)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"cpuPercent": -1}, "limits.cpuPercent"),
        ({"cpuPercent": "many"}, "limits.cpuPercent"),
        ({"cpuPercent": 3201}, "limits.cpuPercent"),
        ({"diskBytesPerSecond": 1.5}, "limits.diskBytesPerSecond"),
        ("all", "limits"),
    ],
)
async def test_limits_that_are_none_are_refused_by_name(client: httpx.AsyncClient, limits: object, words: str):
    assert words in assert_contract_error(await client.post(V2, json={"templateID": "base", "limits": limits}), 400, "invalid_input")


@pytest.mark.parametrize("size", [0, -1, 1.5, "large"])
async def test_a_disk_size_that_is_none_is_refused_by_name(client: httpx.AsyncClient, size: object):
    response = await client.post(V2, json={"templateID": "base", "diskSizeMB": size})
    assert "diskSizeMB" in assert_contract_error(response, 400, "invalid_input")


async def test_null_is_absent(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    names = ("timeout", "autoPause", "autoPauseMemory", "autoResume", "allow_internet_access", "network", "metadata", "envVars")
    response = await client.post(V2, json={"templateID": "base", **dict.fromkeys(names)})
    assert orchestrator.peek(response.json()["sandboxID"]).timeout_s == 300


@pytest.mark.parametrize(
    ("path", "secure", "secured"), [(V1, True, True), (V1, False, False), (V1, None, False), (V2, False, True), (V2, None, True)]
)
async def test_only_the_older_create_may_go_without_a_token(path: str, secure: bool | None, secured: bool, client: httpx.AsyncClient):
    reply = (await client.post(path, json={"templateID": "base", "secure": secure, "timeout": 60})).json()
    detail = (await client.get(f"/sandboxes/{reply['sandboxID']}")).json()
    assert ("envdAccessToken" in reply, "envdAccessToken" in detail) == (secured, secured)
    (child,) = (await client.post(f"/sandboxes/{reply['sandboxID']}/fork", json={"timeout": 60})).json()
    assert ("envdAccessToken" in child["sandbox"]) is secured
    if secured:
        assert child["sandbox"]["envdAccessToken"] != reply["envdAccessToken"]


async def test_characters_beyond_the_basic_plane(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    response = await client.post(V2, content=json.dumps({"templateID": "base", "metadata": {"k": "\U0001f600"}}))
    assert orchestrator.peek(response.json()["sandboxID"]).metadata == {"k": "\U0001f600"}


async def test_body_without_length_and_type(client: httpx.AsyncClient):
    async def chunks():
        yield b'{"template'
        yield b'ID":"base"}'

    assert (await client.post(V2, content=chunks())).status_code == 201


@pytest.mark.parametrize("path", [V1, V2])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "templateID"),
        ({"templateID": None}, "templateID"),
        ({"templateID": 7}, "templateID"),
        ({"templateID": ""}, "templateID"),
        ({"templateID": "no spaces"}, "templateID"),
        ({"templateID": "../etc"}, "templateID"),
        ({"templateID": "a/b/c"}, "templateID"),
        ({"templateID": "x" * 10_000}, "templateID"),
        ({"templateID": "base", "timeout": 0}, "timeout: must be 1 to 86400"),
        ({"templateID": "base", "timeout": -5}, "timeout: must be 1 to 86400"),
        ({"templateID": "base", "timeout": 86401}, "Timeout cannot be greater than 24 hours"),
        ({"templateID": "base", "timeout": 10**30}, "Timeout cannot be greater than 24 hours"),
        ({"templateID": "base", "timeout": "300"}, "timeout"),
        ({"templateID": "base", "timeout": 1.5}, "timeout"),
        ({"templateID": "base", "timeout": True}, "timeout"),
        ({"templateID": "base", "metadata": {"good": "x", "bad": 1}}, "metadata.bad"),
        ({"templateID": "base", "metadata": ["x"]}, "metadata"),
        ({"templateID": "base", "metadata": {"k": "\ud800"}}, "surrogate"),
        ({"templateID": "base", "metadata": {"\ud800": "v"}}, "surrogate"),
        ({"templateID": "base", "envVars": {"A": None}}, "envVars.A"),
        ({"templateID": "base", "envVars": {"A=B": "x"}}, "envVars"),
        ({"templateID": "base", "envVars": {"": "x"}}, "envVars"),
        ({"templateID": "base", "envVars": {"A": "x\0y"}}, "envVars"),
        ({"templateID": "base", "autoPause": "yes"}, "autoPause"),
        ({"templateID": "base", "autoResume": True}, "autoResume"),
        ({"templateID": "base", "network": "none"}, "network"),
        ({"templateID": "base", "network": {"allowPublicTraffic": 0}}, "network.allowPublicTraffic"),
        ({"templateID": "base", "autoPauseMemory": False}, "autoPauseMemory"),
        ({"templateID": "base", "mcp": "server"}, "mcp"),
        ({"templateID": "base", "iam": []}, "iam"),
        ({"templateID": "base", "iam": {"tokens": {"a": {"audience": "x"}}}}, "iam.tokens.a.tokenType"),
        ({"templateID": "base", "iam": {"tokens": {"a": {"audience": "", "tokenType": "JWT-SVID"}}}}, "iam.tokens.a.audience"),
        ({"templateID": "base", "iam": {"tokens": {"a": {"audience": "x", "tokenType": "JWT"}}}}, "iam.tokens.a.tokenType"),
        ({"templateID": "base", "autoPauseMemory": False, "autoPause": True, "autoResume": {"enabled": True}}, "autoResume"),
    ],
)
async def test_bad_fields_are_named(
    path: str, fields: dict[str, Any], named: str, client: httpx.AsyncClient, orchestrator: FakeOrchestrator
):
    response = await client.post(path, content=json.dumps(fields))
    assert (response.status_code, response.json()["code"]) == (400, 400)
    assert named in response.json()["message"]
    assert (await client.get(V1)).json() == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"iam": {"tokens": {"a": {"audience": "x", "tokenType": "JWT-SVID"}}}}, "iam.tokens"),
    ],
)
async def test_unbuilt_fields_are_refused_by_name(fields: dict[str, Any], named: str, client: httpx.AsyncClient):
    response = await client.post(V2, json={"templateID": "base", **fields})
    assert response.status_code == 501
    assert response.json()["error_code"] == "unsupported"
    assert response.json()["message"].startswith(f"{named}: ")
    assert (await client.get(V1)).json() == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"envVars": {"A": "x" * (MAX_ENV_VAR_BYTES - 3)}}, None),
        ({"envVars": {"A": "x" * (MAX_ENV_VAR_BYTES - 2)}}, "'A' takes"),
        ({"envVars": {str(n): "x" * 100_000 for n in range(10)}}, None),
        ({"envVars": {str(n): "x" * 100_000 for n in range(11)}}, "together they take"),
        ({"metadata": {"A": "x" * (MAX_METADATA_BYTES - 1)}}, None),
        ({"metadata": {"A": "x" * MAX_METADATA_BYTES}}, "it takes"),
        ({"metadata": {str(n): "é" * 400 for n in range(100)}}, "it takes"),
    ],
)
def test_sizes_of_metadata_and_environment(fields: dict[str, Any], named: str | None):
    if named is None:
        CreateBody.model_validate({"templateID": "base", **fields})
        return
    with pytest.raises(ValidationError, match=named):
        CreateBody.model_validate({"templateID": "base", **fields})


async def test_a_field_nobody_knows_is_ignored_and_named(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    requests = []
    create = orchestrator.create

    async def seen(request: CreateRequest) -> Sandbox:
        requests.append(request)
        return await create(request)

    orchestrator.create = seen  # type: ignore[method-assign]
    for fields in ({"turbo": True, "another": {"x": 1}}, {"turbo": None}, {"mcp": {"server": {}}, "secure": True}):
        assert (await client.post(V1, json={"templateID": "base", **fields})).status_code == 201
    assert [request.unknown_fields for request in requests] == [("another", "turbo"), (), ()]


async def test_unknown_template(client: httpx.AsyncClient):
    response = await client.post(V2, json={"templateID": "nothing"})
    assert response.status_code == 404
    assert "nothing" in response.json()["message"]


async def test_full_node(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    orchestrator.sandboxes_running = 0
    response = await client.post(V2, json={"templateID": "base"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize("declared", [True, False])
async def test_body_limit(declared: bool, client: httpx.AsyncClient):
    body = b'{"templateID":"base","metadata":{"a":"' + b"x" * 70_000 + b'"}}'

    async def chunks():
        for start in range(0, len(body), 8192):
            yield body[start : start + 8192]

    response = await client.post(V2, content=body if declared else chunks())
    assert response.status_code == 413
    assert response.json()["code"] == 413
    assert response.headers["should-retry"] == "false"
