"""A node without VMs for tests of `aenv up` and `aenv down`: the real API over an orchestrator in memory.

FAKE_WIRING in the environment makes it misbehave: `prepare-fails`, `serve-dies`, `serve-hangs`, `stop-hangs`;
FAKE_HEALTH_DEADLINE_S and FAKE_STOP_DEADLINE_S shorten what `cli.server` waits.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import agentenv.cli.server
from agentenv.core.errors import HostNotReady
from agentenv.core.paths import NodePaths

MODE = os.environ.get("FAKE_WIRING", "")
for name in ("HEALTH_DEADLINE_S", "STOP_DEADLINE_S"):
    if value := os.environ.get(f"FAKE_{name}"):
        setattr(agentenv.cli.server, name, float(value))
KEY = "e2b_" + "0123456789" * 4


@dataclass(frozen=True)
class Kernel:
    version: str
    path: Path


@dataclass(frozen=True)
class Assets:
    kernel: Kernel
    verified: bool


def prepare(config, progress):
    if MODE == "prepare-fails":
        raise HostNotReady("no mirror answers", "check the network")
    for done in (0, 50, 100):
        time.sleep(float(os.environ.get("FAKE_STEP_S", "0")))
        progress("fetch guest kernel (bytes)", done << 20, 100 << 20)
    progress("build base template", None, None)
    path = NodePaths(config.node.home, config.node.run).api_key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(KEY + "\n")
    path.chmod(0o600)


@dataclass(frozen=True)
class Succession:
    ready: Callable[[list[int]], None]
    start_next: Callable
    inherited: list


def serve(config, succession):
    import uvicorn

    from agentenv.api.app import create_app
    from agentenv.api.auth import KeyRing
    from agentenv.api.settings import ApiSettings
    from agentenv.testing.fake_orchestrator import FakeOrchestrator

    if MODE == "serve-dies":
        print("about to die of a bad database", flush=True)
        raise SystemExit(7)
    if MODE == "serve-hangs":
        time.sleep(600)
    if MODE == "stop-hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    succession.ready([])
    app = create_app(FakeOrchestrator(), KeyRing([KEY]), ApiSettings.from_config(config.api))
    server = uvicorn.Server(uvicorn.Config(app, host=config.api.host, port=config.api.port, log_level="warning"))
    if MODE == "stop-hangs":
        server.capture_signals = contextlib.nullcontext
    server.run()


def shut_down(config, kill_sandboxes, report):
    report("killed 2 sandboxes" if kill_sandboxes else "paused 2 sandboxes")


def ensure_assets(config, progress, verify=False):
    progress("fetch guest kernel", 1, 1)
    return Assets(Kernel("6.12", Path("/x")), verify)
