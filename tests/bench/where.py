"""Where the time of each verb goes: the steps that the node times itself, as its `Server-Timing` header says."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from samples import DEADLINE_S, N, step

_ROUNDS = max(3, min(10, N // 5))
#: In the order of the table, with what each does.
STEPS = {
    "record": "commits to the database",
    "check": "looks whether the snapshot is whole",
    "queue": "waits for other starts",
    "slot": "takes a network slot",
    "stacks": "opens memory and disk",
    "spawn": "starts the VMM process",
    "fill": "copies what is the sandbox's alone into its memory",
    "load": "VMM loads the state and runs",
    "guest": "guest answers its agent's call",
    "stop": "stops the VM, drains its disk",
    "write": "writes memory and device state",
    "seal": "seals the disk's layer",
}


def measure() -> dict[str, dict[str, float]]:
    """By verb: medians of its steps, and of the whole as the client sees it, in ms."""
    step(f"where the time of each verb goes, {_ROUNDS} times")
    found: dict[str, list[dict[str, float]]] = {}
    headers = {"X-API-KEY": os.environ["E2B_API_KEY"]}
    with httpx.Client(base_url=os.environ["E2B_API_URL"], headers=headers, timeout=DEADLINE_S) as client:

        def call(verb: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
            began = time.perf_counter()
            reply = client.request(method, path, json=body)
            took_ms = 1000 * (time.perf_counter() - began)
            reply.raise_for_status()
            found.setdefault(verb, []).append({**_steps(reply.headers.get("server-timing", "")), "whole": took_ms})
            return reply.json() if reply.content else None

        for _ in range(_ROUNDS):
            path = f"/sandboxes/{call('create', 'POST', '/v2/sandboxes', {'templateID': 'base', 'timeout': 600})['sandboxID']}"
            kept = call("checkpoint", "POST", f"{path}/checkpoints", {})["checkpointID"]
            call("rollback", "POST", f"{path}/rollback", {"checkpointID": kept})
            name = call("snapshot", "POST", f"{path}/snapshots", {})["snapshotID"]
            client.delete(f"/templates/{name}").raise_for_status()
            call("pause", "POST", f"{path}/pause")
            call("resume", "POST", f"/v2{path}/connect", {"timeout": 600})
            call("kill", "DELETE", path)
    return {verb: _medians(samples) for verb, samples in found.items()}


def _steps(header: str) -> dict[str, float]:
    parts = (part.strip().partition(";dur=") for part in header.split(","))
    return {name: float(took) for name, _, took in parts if took}


def _medians(samples: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in names}


def report(found: dict[str, dict[str, float]]) -> None:
    """Print the table."""
    table = Table(title="where the time goes, ms: medians of the steps that the node times (without the first output)")
    verbs = list(found)
    for column in ("step", *verbs):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name, what in STEPS.items():
        table.add_row(f"{name}: {what}", *(_cell(found[verb].get(name)) for verb in verbs))
    rest = {verb: of["whole"] - sum(took for name, took in of.items() if name in STEPS) for verb, of in found.items()}
    table.add_row("the rest of the call", *(_cell(rest[verb]) for verb in verbs))
    table.add_row("the whole call", *(_cell(found[verb]["whole"]) for verb in verbs), style="bold")
    Console().print(table)


def _cell(took_ms: float | None) -> str:
    return "" if took_ms is None else f"{took_ms:.1f}"
