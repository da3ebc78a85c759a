"""An answer says where the time of its call went: in its own steps, not in those of calls beside it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from agentenv.core.model import CreateRequest, Sandbox
from agentenv.core.spans import span
from agentenv.testing.fake_orchestrator import FakeOrchestrator


@pytest.fixture
def slow(orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Creations take steps that are named as their template."""
    create = orchestrator.create

    async def stepwise(request: CreateRequest) -> Sandbox:
        with span(request.template):
            await asyncio.sleep(0.02)
        return await create(request)

    monkeypatch.setattr(orchestrator, "create", stepwise)


@pytest.mark.usefixtures("slow")
async def test_calls_side_by_side_have_steps_of_their_own(client: httpx.AsyncClient):
    names = ["base", "python", "base"]
    replies = await asyncio.gather(*(client.post("/v2/sandboxes", json={"templateID": name}) for name in names))
    for name, reply in zip(names, replies, strict=True):
        steps = dict(part.split(";dur=") for part in reply.headers["server-timing"].split(", "))
        assert list(steps) == [name]
        assert float(steps[name]) >= 20


async def test_a_call_without_timed_steps_says_nothing(client: httpx.AsyncClient):
    assert "server-timing" not in (await client.get("/v2/sandboxes")).headers
