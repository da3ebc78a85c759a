"""What a run of all clients leaves for the docs: `docs/conformance_results.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from catalogue import CLI_SCENARIOS, CLIENTS, INTERPRETER_SCENARIOS, KNOWN_LIMITS, SCENARIOS
from runner import Run

FILE = Path(__file__).parents[2] / "docs" / "conformance_results.json"


def write(runs: Iterable[Run], file: Path = FILE) -> None:
    """Outcomes of every client in the catalogue's order; only a failure keeps its detail.

    Clients that were not run now keep what their last run has left, with its date.
    """
    known = {client.name: number for number, client in enumerate(CLIENTS)}
    former = json.loads(file.read_text()) if file.exists() else {"clients": [], "methods": {}}
    today = datetime.now(UTC).date().isoformat()
    clients = {client["name"]: client for client in former["clients"]}
    methods = dict(former["methods"])
    for run in runs:
        outcomes = {outcome.scenario: _entry(run, outcome) for outcome in run.outcomes}
        clients[run.client.name] = {"name": run.client.name, "date": today, "outcomes": outcomes}
        if run.public:
            not_called = sorted(set(run.public) - set(run.called))
            methods[run.client.name] = {"public": len(run.public), "called": len(run.called), "not_called": not_called}
    content = {
        "scenarios": SCENARIOS | INTERPRETER_SCENARIOS | CLI_SCENARIOS,
        "clients": sorted((client for name, client in clients.items() if name in known), key=lambda client: known[client["name"]]),
        "methods": {name: counts for name, counts in methods.items() if name in known},
    }
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _entry(run, outcome):
    kept = {"outcome": outcome.outcome}
    if outcome.outcome == "fail":
        last = (outcome.detail.strip().splitlines() or ["no detail"])[-1]
        kept["detail"] = KNOWN_LIMITS.get((run.client.name, outcome.scenario), last)
    return kept
