"""Network settings: what is accepted, what is refused and in which words, and that they are shown as they were given (section 2.6)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agentenv.api.network_models import MAX_DESTINATIONS
from agentenv.testing.fake_orchestrator import FakeOrchestrator

ALL_TRAFFIC = "0.0.0.0/0"
NEEDS_ALL_TRAFFIC = "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other traffic."
EGRESS: dict[str, Any] = {
    "allowOut": ["1.1.1.1", "10.0.0.0/8", "2606:4700::/32", "example.com", "*.example.org"],
    "denyOut": [ALL_TRAFFIC, "8.8.8.8"],
    "dnsServers": ["9.9.9.9"],
    "egressProxy": {
        "address": "proxy.test:1080",
        "username": "u",
        "password": "p",
        "tls": {"enabled": True, "serverName": "proxy.test", "caCert": "PEM"},
    },
    "rules": {"api.example.com": [{"transform": {"headers": {"Authorization": "Bearer x"}}}, {}]},
}
FOR_LIFE: dict[str, Any] = {"allowPublicTraffic": False, "maskRequestHost": "localhost:${PORT}", "httpsPorts": [8443]}


async def _create(client: httpx.AsyncClient, network: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
    return await client.post("/v2/sandboxes", json={"templateID": "base", "network": network, **fields})


async def _detail(client: httpx.AsyncClient, sandbox_id: str) -> dict[str, Any]:
    return dict((await client.get(f"/sandboxes/{sandbox_id}")).json())


async def test_what_was_given_is_shown(client: httpx.AsyncClient) -> None:
    response = await _create(client, {**EGRESS, **FOR_LIFE}, allow_internet_access=False)
    assert response.status_code == 201
    detail = await _detail(client, response.json()["sandboxID"])
    assert (detail["network"], detail["allowInternetAccess"]) == ({**EGRESS, **FOR_LIFE}, False)


async def test_what_was_never_said_is_not_shown(client: httpx.AsyncClient) -> None:
    detail = await _detail(client, (await _create(client)).json()["sandboxID"])
    assert (detail["network"], detail["allowInternetAccess"]) == ({"allowPublicTraffic": True}, None)


@pytest.mark.parametrize("name", [*EGRESS, *FOR_LIFE])
async def test_each_setting_alone_and_as_null(name: str, client: httpx.AsyncClient) -> None:
    value = ["1.1.1.1"] if name == "allowOut" else {**EGRESS, **FOR_LIFE}[name]
    detail = await _detail(client, (await _create(client, {name: value})).json()["sandboxID"])
    assert detail["network"] == {"allowPublicTraffic": True, name: value}
    detail = await _detail(client, (await _create(client, {name: None})).json()["sandboxID"])
    assert detail["network"] == {"allowPublicTraffic": True}


async def test_put_replaces_everything_that_can_be_replaced(client: httpx.AsyncClient) -> None:
    sandbox_id = (await _create(client, {**EGRESS, **FOR_LIFE}, allow_internet_access=False)).json()["sandboxID"]
    wanted = {"denyOut": ["9.9.9.0/24"], "allow_internet_access": True}
    response = await client.put(f"/sandboxes/{sandbox_id}/network", json=wanted)
    assert (response.status_code, response.content) == (204, b"")
    detail = await _detail(client, sandbox_id)
    assert (detail["network"], detail["allowInternetAccess"]) == ({**FOR_LIFE, "denyOut": ["9.9.9.0/24"]}, True)
    assert (await client.put(f"/sandboxes/{sandbox_id}/network", json={})).status_code == 204
    detail = await _detail(client, sandbox_id)
    assert (detail["network"], detail["allowInternetAccess"]) == (FOR_LIFE, None)


async def test_put_is_for_those_that_run(client: httpx.AsyncClient) -> None:
    sandbox_id = (await _create(client)).json()["sandboxID"]
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    assert (await client.put(f"/sandboxes/{sandbox_id}/network", json={})).status_code == 409
    await client.delete(f"/sandboxes/{sandbox_id}")
    for gone in (sandbox_id, "i" + "0" * 20, "nonexistingsandbox"):
        assert (await client.put(f"/sandboxes/{gone}/network", json={})).status_code == 404


@pytest.mark.parametrize("call", ["pause", "fork"])
async def test_settings_outlive_a_pause_and_are_copied_by_a_fork(call: str, client: httpx.AsyncClient) -> None:
    sandbox_id = (await _create(client, {**EGRESS, **FOR_LIFE})).json()["sandboxID"]
    reply = await client.post(f"/sandboxes/{sandbox_id}/{call}")
    if call == "fork":
        sandbox_id = reply.json()[0]["sandbox"]["sandboxID"]
    assert (await _detail(client, sandbox_id))["network"] == {**EGRESS, **FOR_LIFE}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"allowOut": "1.1.1.1"}, "allowOut"),
    ({"allowOut": [1]}, "allowOut.0"),
    ({"allowOut": ["1.1.1.1/33"]}, "allowOut: '1.1.1.1/33' is not an IP address, a CIDR range or a domain name"),
    ({"allowOut": ["http://example.com"], "denyOut": [ALL_TRAFFIC]}, "allowOut: 'http://example.com' is not"),
    ({"allowOut": ["*"], "denyOut": [ALL_TRAFFIC]}, "allowOut: '*' is not"),
    ({"allowOut": ["a.*.com"], "denyOut": [ALL_TRAFFIC]}, "allowOut: 'a.*.com' is not"),
    ({"allowOut": ["1.1.1"], "denyOut": [ALL_TRAFFIC]}, "allowOut: '1.1.1' is not"),
    ({"allowOut": ["x" * 64 + ".com"], "denyOut": [ALL_TRAFFIC]}, "allowOut"),
    ({"allowOut": ["1.1.1.1"] * (MAX_DESTINATIONS + 1)}, "allowOut"),
    ({"allowOut": ["example.com"]}, NEEDS_ALL_TRAFFIC),
    ({"allowOut": ["1.1.1.1", "*.example.com"], "denyOut": ["10.0.0.0/8"]}, NEEDS_ALL_TRAFFIC),
    ({"denyOut": ["example.com"]}, "denyOut: 'example.com' is not an IP address or a CIDR range; domains cannot be denied"),
    ({"denyOut": ["*.example.com"]}, "denyOut"),
    ({"denyOut": [""]}, "denyOut"),
    ({"dnsServers": ["dns.test"]}, "dnsServers.0: 'dns.test' is not an IPv4 address"),
    ({"dnsServers": ["2606:4700::1"]}, "dnsServers.0"),
    ({"egressProxy": "proxy:1080"}, "egressProxy"),
    ({"egressProxy": {}}, "egressProxy.address"),
    ({"egressProxy": {"address": "proxy.test"}}, "egressProxy.address: 'proxy.test' is not host:port"),
    ({"egressProxy": {"address": "proxy.test:0"}}, "egressProxy.address"),
    ({"egressProxy": {"address": "socks5://p:1"}}, "egressProxy.address"),
    ({"egressProxy": {"address": "p:1", "password": "x"}}, "egressProxy: a password needs a username"),
    ({"egressProxy": {"address": "p:1", "username": "x" * 256}}, "egressProxy.username"),
    ({"egressProxy": {"address": "p:1", "tls": {}}}, "egressProxy.tls.enabled"),
    ({"egressProxy": {"address": "p:1", "tls": {"enabled": False, "caCert": "x"}}}, "egressProxy.tls"),
    ({"egressProxy": {"address": "p:1", "port": 1}}, "egressProxy.port"),
    ({"rules": []}, "rules"),
    ({"rules": {"*": []}}, "rules"),
    ({"rules": {"1.1.1.1": []}}, "rules"),
    ({"rules": {"a.com": {}}}, "rules.a.com"),
    ({"rules": {"a.com": [{"transform": {"headers": {"A": 1}}}]}}, "rules.a.com.0.transform.headers.A"),
    ({"rules": {"a.com": [{"transform": {"headers": {"A B": "x"}}}]}}, "'A B' is not a header name"),
    ({"rules": {"a.com": [{"transform": {"headers": {"A": "x\r\nB: y"}}}]}}, "has a line break"),
    ({"rules": {"a.com": [{"transform": {"path": "x"}}]}}, "rules.a.com.0.transform"),
    ({"rules": {"a.com": [{}] * 11}}, "rules.a.com"),
    ({"surprise": 1}, "surprise"),
]
BAD_FOR_LIFE: list[tuple[dict[str, Any], str]] = [
    ({"maskRequestHost": ""}, "maskRequestHost"),
    ({"maskRequestHost": "a b"}, "maskRequestHost"),
    ({"maskRequestHost": "http://x"}, "maskRequestHost"),
    ({"maskRequestHost": "x:70000"}, "maskRequestHost"),
    ({"maskRequestHost": "x\r\nA: b"}, "maskRequestHost"),
    ({"maskRequestHost": "x-${HOST}"}, "maskRequestHost"),
    ({"httpsPorts": [49983]}, "httpsPorts.0: 49983 is the guest agent's port"),
    ({"httpsPorts": [0]}, "httpsPorts.0"),
    ({"httpsPorts": [65536]}, "httpsPorts.0"),
    ({"httpsPorts": ["443"]}, "httpsPorts.0"),
    ({"allow_internet_access": True}, "allow_internet_access"),
]


@pytest.mark.parametrize(("network", "named"), [*BAD, *BAD_FOR_LIFE])
async def test_bad_settings_of_a_creation_are_named(network: dict[str, Any], named: str, client: httpx.AsyncClient) -> None:
    response = await _create(client, network)
    assert (response.status_code, response.json()["code"]) == (400, 400)
    assert named in response.json()["message"]
    assert (await client.get("/sandboxes")).json() == []


@pytest.mark.parametrize(("network", "named"), [*BAD, *(({name: value}, name) for name, value in FOR_LIFE.items())])
async def test_bad_settings_of_a_put_are_named_and_change_nothing(
    network: dict[str, Any], named: str, client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    sandbox_id = (await _create(client, {"denyOut": ["9.9.9.9"]})).json()["sandboxID"]
    before = orchestrator.peek(sandbox_id)
    response = await client.put(f"/sandboxes/{sandbox_id}/network", json=network)
    assert response.status_code == 400
    assert named in response.json()["message"]
    assert orchestrator.peek(sandbox_id) == before


@pytest.mark.parametrize(
    "mask", ["localhost", "localhost:${PORT}", "${PORT}.example.com", "127.0.0.1:${PORT}", "[::1]:8080", "Example.COM"]
)
async def test_hosts_that_can_be_a_mask(mask: str, client: httpx.AsyncClient) -> None:
    assert (await _create(client, {"maskRequestHost": mask})).status_code == 201


async def test_domains_are_kept_in_lower_case(client: httpx.AsyncClient) -> None:
    network = {"allowOut": ["*.Example.COM."], "denyOut": [ALL_TRAFFIC], "rules": {"API.Example.com": []}}
    detail = await _detail(client, (await _create(client, network)).json()["sandboxID"])
    assert (detail["network"]["allowOut"], list(detail["network"]["rules"])) == (["*.example.com"], ["api.example.com"])
