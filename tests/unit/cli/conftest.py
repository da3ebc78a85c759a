"""A real API on loopback over an orchestrator in memory, away from the node of this machine."""

import os
import socket
import threading

import pytest
import uvicorn
from aenv_runner import KEY, Aenv, Server, free_port, wait_for

from agentenv.api.app import create_app
from agentenv.api.auth import KeyRing
from agentenv.api.settings import ApiSettings
from agentenv.testing.fake_orchestrator import FakeOrchestrator


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No test sees the machine's own node or settings."""
    for name in [name for name in os.environ if name.startswith(("E2B_", "AENV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AENV_NODE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AENV_NODE_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("AENV_API_PORT", str(free_port()))
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def server():
    orchestrator = FakeOrchestrator()
    app = create_app(orchestrator, KeyRing([KEY]), ApiSettings(domain="localhost"))
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: running.started)
    yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", orchestrator)
    running.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def aenv(server):
    return Aenv(server)
