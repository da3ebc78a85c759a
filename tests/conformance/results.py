"""What a run of all clients leaves for the docs: `docs/conformance_results.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from catalogue import CLI_SCENARIOS, KNOWN_LIMITS, SCENARIOS
from runner import Run

FILE = Path(__file__).parents[2] / "docs" / "conformance_results.json"


def write(runs: Iterable[Run], file: Path = FILE) -> None:
    """Outcomes of every client in the order of `runs`; only a failure keeps its detail."""
    runs = list(runs)
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "scenarios": SCENARIOS | CLI_SCENARIOS,
        "clients": [
            {"name": run.client.name, "outcomes": {outcome.scenario: _entry(run, outcome) for outcome in run.outcomes}} for run in runs
        ],
        "methods": {
            run.client.name: {
                "public": len(run.public),
                "called": len(run.called),
                "not_called": sorted(set(run.public) - set(run.called)),
            }
            for run in runs
            if run.public
        },
    }
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _entry(run, outcome):
    kept = {"outcome": outcome.outcome}
    if outcome.outcome == "fail":
        last = (outcome.detail.strip().splitlines() or ["no detail"])[-1]
        kept["detail"] = KNOWN_LIMITS.get((run.client.name, outcome.scenario), last)
    return kept
