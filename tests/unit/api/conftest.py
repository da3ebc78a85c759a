from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fastapi import FastAPI

from agentenv.api.app import create_app
from agentenv.api.auth import KeyRing
from agentenv.api.serve import api_server
from agentenv.api.settings import ApiSettings
from agentenv.testing.fake_orchestrator import FakeOrchestrator, ManualClock, make_template


@pytest.fixture
def key() -> str:
    return "e2b_" + "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def orchestrator(clock: ManualClock) -> FakeOrchestrator:
    return FakeOrchestrator(clock, [make_template("base"), make_template("python", created_at_ms=1_700_000_000_001)])


@pytest.fixture
def app(orchestrator: FakeOrchestrator, key: str, clock: ManualClock) -> FastAPI:
    return create_app(orchestrator, KeyRing([key, "e2b_" + "9" * 40]), ApiSettings("sandbox.test:3000", body_limit_bytes=64 * 1024), clock)


@pytest.fixture
async def client(app: FastAPI, key: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers={"X-API-KEY": key}) as client:
        yield client


@pytest.fixture
async def stranger(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a key."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api.test") as client:
        yield client


@pytest.fixture
def live_orchestrator() -> FakeOrchestrator:
    return FakeOrchestrator()


@pytest.fixture
def live_port(live_orchestrator: FakeOrchestrator, key: str) -> Iterator[int]:
    """The API on a real TCP port, served by uvicorn in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = api_server(create_app(live_orchestrator, KeyRing([key]), ApiSettings(f"localhost:{port}", body_limit_bytes=64 * 1024)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start within 10 s"
        time.sleep(0.01)
    yield port
    server.should_exit = True
    thread.join(timeout=15)
    assert not thread.is_alive(), "the server did not stop within 15 s"
    listener.close()
