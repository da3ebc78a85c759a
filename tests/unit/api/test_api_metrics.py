"""What sandboxes use, over the wire and through the official SDK (contract section 2.3)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from e2b import AsyncSandbox, Sandbox
from e2b.api import client_async
from e2b.api.client.api.sandboxes import get_sandboxes_metrics
from e2b.connection_config import ConnectionConfig
from e2b.exceptions import SandboxNotFoundException

from agentenv.api.views import MetricView
from agentenv.core.clock import rfc3339
from agentenv.testing.fake_orchestrator import FakeOrchestrator, ManualClock

Options = dict[str, Any]


@pytest.fixture
async def sandbox_id(client: httpx.AsyncClient) -> str:
    return (await client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 3600})).json()["sandboxID"]


@pytest.fixture
def options(live_port: int, key: str) -> Options:
    url = f"http://127.0.0.1:{live_port}"
    return {"api_key": key, "api_url": url, "sandbox_url": url}


async def seconds(client: httpx.AsyncClient, sandbox_id: str, **query: int) -> list[int]:
    reply = await client.get(f"/sandboxes/{sandbox_id}/metrics", params=query)
    assert reply.status_code == 200
    return [sample["timestampUnix"] for sample in reply.json()]


async def test_a_sample_has_exactly_the_contracts_fields(client: httpx.AsyncClient, orchestrator: FakeOrchestrator, sandbox_id: str):
    added = orchestrator.add_sample(sandbox_id, 37.5)
    [sample] = (await client.get(f"/sandboxes/{sandbox_id}/metrics")).json()
    assert sample == {
        "timestamp": rfc3339(added.timestamp_ms),
        "timestampUnix": added.timestamp_ms // 1000,
        "cpuCount": 1,
        "cpuUsedPct": 37.5,
        "memUsed": 128 << 20,
        "memTotal": 512 << 20,
        "memCache": 32 << 20,
        "diskUsed": 1 << 30,
        "diskTotal": 8 << 30,
    }
    assert sample.keys() == MetricView.__annotations__.keys()


async def test_ranges_include_both_seconds_and_are_in_order(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, clock: ManualClock, sandbox_id: str
):
    born_s = clock.now_ms() // 1000
    for after_ms in (5_400, 400, 10_999):
        orchestrator.add_sample(sandbox_id, timestamp_ms=1000 * born_s + after_ms)
    assert await seconds(client, sandbox_id) == [born_s, born_s + 5, born_s + 10]
    assert await seconds(client, sandbox_id, start=born_s + 5) == [born_s + 5, born_s + 10]
    assert await seconds(client, sandbox_id, start=born_s + 6) == [born_s + 10]
    assert await seconds(client, sandbox_id, end=born_s + 10) == [born_s, born_s + 5, born_s + 10]
    assert await seconds(client, sandbox_id, end=born_s + 9) == [born_s, born_s + 5]
    assert await seconds(client, sandbox_id, start=1000 * (born_s + 5), end=1000 * (born_s + 5) + 999) == [born_s + 5], "milliseconds"
    assert await seconds(client, sandbox_id, start=born_s + 5, end=born_s + 5) == [born_s + 5]
    assert await seconds(client, sandbox_id, start=born_s - 100, end=born_s - 1) == []
    assert await seconds(client, sandbox_id, start=0, end=0) == []


async def test_none_yet(client: httpx.AsyncClient, sandbox_id: str):
    assert await seconds(client, sandbox_id) == []


@pytest.mark.parametrize(
    "query", ["start=-1", "start=x", "end=1.5", "end=-1", "start=10&end=9", f"end={2**53}", f"start={10**30}", "start=", "start=NaN"]
)
async def test_ranges_that_are_none(client: httpx.AsyncClient, sandbox_id: str, query: str):
    reply = await client.get(f"/sandboxes/{sandbox_id}/metrics?{query}")
    assert (reply.status_code, reply.json()["code"], reply.json()["error_code"]) == (400, 400, "invalid_input")
    assert reply.json()["message"].startswith(("start", "end"))


@pytest.mark.parametrize("name", ["inothing", "nonexistingsandbox", "A%20B", "metrics"])
async def test_an_unknown_sandbox(client: httpx.AsyncClient, name: str):
    reply = await client.get(f"/sandboxes/{name}/metrics")
    assert (reply.status_code, reply.json()["code"]) == (404, 404)
    assert "doesn't exist or you don't have access to it" in reply.json()["message"]


async def test_paused_and_ended_ones_keep_theirs(client: httpx.AsyncClient, orchestrator: FakeOrchestrator, sandbox_id: str):
    orchestrator.add_sample(sandbox_id)
    before = await seconds(client, sandbox_id)
    await client.post(f"/sandboxes/{sandbox_id}/pause")
    assert await seconds(client, sandbox_id) == before
    await client.delete(f"/sandboxes/{sandbox_id}")
    assert await seconds(client, sandbox_id) == before
    assert await seconds(client, f"{sandbox_id}-local") == before


async def test_the_latest_of_several(client: httpx.AsyncClient, orchestrator: FakeOrchestrator, clock: ManualClock, sandbox_id: str):
    other = (await client.post("/v2/sandboxes", json={"templateID": "base"})).json()["sandboxID"]
    idle = (await client.post("/v2/sandboxes", json={"templateID": "base"})).json()["sandboxID"]
    orchestrator.add_sample(sandbox_id, 1.0)
    clock.advance_ms(5_000)
    newest = orchestrator.add_sample(sandbox_id, 2.0)
    orchestrator.add_sample(other, 3.0)
    for query in (f"sandbox_ids={sandbox_id},{other},{idle},inothing", f"sandbox_ids={sandbox_id}-local&sandbox_ids={other}%2C{other}"):
        reply = await client.get(f"/sandboxes/metrics?{query}")
        assert reply.status_code == 200
        assert reply.json().keys() == {"sandboxes"}
        found = reply.json()["sandboxes"]
        assert {name: sample["cpuUsedPct"] for name, sample in found.items()} == {sandbox_id: 2.0, other: 3.0}
        assert found[sandbox_id]["timestamp"] == rfc3339(newest.timestamp_ms)
        assert found[sandbox_id].keys() == MetricView.__annotations__.keys()


async def test_the_latest_of_a_hundred_at_most(client: httpx.AsyncClient):
    names = [f"i{number:020}" for number in range(101)]
    assert (await client.get("/sandboxes/metrics", params={"sandbox_ids": ",".join(names[:100])})).json() == {"sandboxes": {}}
    assert (await client.get("/sandboxes/metrics", params={"sandbox_ids": ""})).json() == {"sandboxes": {}}
    for query in ({"sandbox_ids": ",".join(names)}, {}):
        reply = await client.get("/sandboxes/metrics", params=query)
        assert (reply.status_code, reply.json()["error_code"]) == (400, "invalid_input")
        assert reply.json()["message"].startswith("sandbox_ids: ")


def test_the_sdk(options: Options, live_orchestrator: FakeOrchestrator):
    sandbox = Sandbox.create("base", **options)
    assert sandbox.get_metrics() == []
    added = live_orchestrator.add_sample(sandbox.sandbox_id, 37.5)
    [metric] = sandbox.get_metrics()
    assert (metric.cpu_count, metric.cpu_used_pct) == (1, 37.5)
    assert (metric.mem_used, metric.mem_total, metric.mem_cache) == (128 << 20, 512 << 20, 32 << 20)
    assert (metric.disk_used, metric.disk_total) == (1 << 30, 8 << 30)
    assert metric.timestamp == datetime.fromtimestamp(added.timestamp_ms / 1000, UTC)
    now = datetime.now(UTC)
    assert len(sandbox.get_metrics(start=now - timedelta(seconds=30), end=now)) == 1
    assert sandbox.get_metrics(start=now - timedelta(days=2), end=now - timedelta(days=1)) == []
    assert len(Sandbox.get_metrics(sandbox.sandbox_id, **options)) == 1
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_metrics("nonexistingsandbox", **options)


async def test_the_async_sdk(options: Options, live_orchestrator: FakeOrchestrator):
    sandbox = await AsyncSandbox.create("base", **options)
    assert await sandbox.get_metrics() == []
    live_orchestrator.add_sample(sandbox.sandbox_id, 37.5)
    [metric] = await sandbox.get_metrics()
    assert (metric.cpu_used_pct, metric.mem_total) == (37.5, 512 << 20)
    now = datetime.now(UTC)
    assert await sandbox.get_metrics(start=now - timedelta(days=2), end=now - timedelta(days=1)) == []
    assert len(await AsyncSandbox.get_metrics(sandbox.sandbox_id, start=now - timedelta(seconds=30), **options)) == 1
    with pytest.raises(SandboxNotFoundException):
        await AsyncSandbox.get_metrics("nonexistingsandbox", **options)


async def test_the_sdks_own_client_reads_the_latest_of_several(options: Options, live_orchestrator: FakeOrchestrator):
    sandbox, other = [await AsyncSandbox.create("base", **options) for _ in range(2)]
    live_orchestrator.add_sample(sandbox.sandbox_id, 37.5)
    api = client_async.get_api_client(ConnectionConfig(api_key=options["api_key"], api_url=options["api_url"]))
    found = await get_sandboxes_metrics.asyncio(client=api, sandbox_ids=[sandbox.sandbox_id, other.sandbox_id])
    assert found is not None
    assert {name: sample["cpuUsedPct"] for name, sample in found.to_dict()["sandboxes"].items()} == {sandbox.sandbox_id: 37.5}
