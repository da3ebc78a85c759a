"""Runs a client's scenarios in the client's own environment and collects what it tells, one JSON line per scenario.

A scenario that tells nothing within `SCENARIO_DEADLINE_S` has failed; its process is ended and the rest goes on in a new one.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from catalogue import NEWEST_PYTHON, Client
from install import installed, node_program

HERE = Path(__file__).parent
SCENARIO_DEADLINE_S = 240  # the longest takes about 15 s on an idle machine
_CLIENT_VARIABLES = ("E2B_", "SSL_CERT", "NODE_EXTRA_CA_CERTS", "AENV_")


@dataclass
class Outcome:
    """How one scenario ended: `pass`, `fail` or `absent`, and why."""

    scenario: str
    outcome: str
    detail: str
    took_ms: int


@dataclass
class Run:
    """All outcomes of one client, and for a recorded run the SDK's public methods and those that were called."""

    client: Client
    outcomes: list[Outcome] = field(default_factory=list)
    public: list[str] = field(default_factory=list)
    called: list[str] = field(default_factory=list)

    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.outcome == "fail"]


Runs = Callable[[Client], Run]


def command_of(client: Client) -> list[str]:
    """The client's script, without scenarios. RuntimeError when the client cannot be installed."""
    if client.kind.startswith("python"):
        python = sys.executable if _is_here(client) else str(installed(client) / "bin" / "python")
        more = ["--asynchronous"] if client.kind == "python-async" else []
        more += ["--interpreter"] if client.is_interpreter else []
        return [python, str(HERE / "python_client" / "main.py"), *more]
    if client.kind == "cli":
        program = installed(client) / "node_modules" / ".bin" / "e2b"
        return [sys.executable, str(HERE / "cli_client" / "main.py"), "--program", str(program)]
    return [
        node_program(),
        str(HERE / "javascript_client" / "main.mjs"),
        "--package",
        str(installed(client) / "node_modules" / client.package),
    ]


def _is_here(client: Client) -> bool:
    """The newest releases are this environment's own, so that `make test` installs nothing more for them."""
    from importlib.metadata import version

    return version("e2b") == NEWEST_PYTHON and version(client.package) == client.version


def run(client: Client, scenarios: Sequence[str], variables: dict[str, str], *, record: bool = False) -> Run:
    """Every scenario with `client`; `variables` point it at the node and are all it knows of this process's settings."""
    result = Run(client)
    left = list(scenarios)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_CLIENT_VARIABLES)} | variables
    environment["NO_UPDATE_NOTIFIER"] = "1"  # the command line client would ask its registry on every call
    while left:
        told = 0
        for line in _lines([*command_of(client), *(["--record"] if record else []), *left], environment):
            if "scenario" in line:
                result.outcomes.append(Outcome(**line))
                told += 1
            else:
                result.public, result.called = line["public"], sorted({*result.called, *line["called"]})
        left = left[told:]
        if left:
            result.outcomes.append(Outcome(left.pop(0), "fail", f"nothing within {SCENARIO_DEADLINE_S} s, or the client died", 0))
    return result


def _lines(command: list[str], environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The lines of one process until it ends or is silent too long."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        while (line := lines.get(timeout=SCENARIO_DEADLINE_S)) is not None:
            if line.startswith("{"):
                yield json.loads(line)
    except queue.Empty:
        return
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        reader.join(10)
        process.stdout.close()


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
