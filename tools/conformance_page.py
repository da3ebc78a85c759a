"""The page that tells which official clients were tried with which scenarios, and how the official suites ended.

Its sources are two files beside it: `conformance_results.json`, written by `make conformance`, and `conformance_official.json`,
kept by hand, a list of runs:

    {"suite": "e2b Python SDK", "version": "2.45.1", "date": "2026-01-31", "how": "single-host mode, no internet",
     "passed": 300, "failed": 3, "skipped": 1, "failures": [{"test": "tests/a.py::test_b", "reason": "why it fails here"}]}
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

NOTE = "<!-- Made by `make docs` from conformance_results.json and conformance_official.json; edit those, not this page. -->\n\n"
_MARKS = {"pass": "yes", "fail": "**no**", "absent": "-"}


def conformance_page(folder: Path) -> str:
    """The whole page, from the two files in `folder`."""
    results = json.loads((folder / "conformance_results.json").read_text())
    official = json.loads((folder / "conformance_official.json").read_text())
    parts = [
        "# Official clients against this server\n",
        "`make conformance` runs our own scenarios through unchanged releases of the official clients against one real node "
        "(QEMU guests) and writes this page. A fast part of it belongs to `make test`.\n",
        "`yes` passed, `**no**` failed, `-` the release has no such call or the client is of another kind.\n",
        *_matrix(results),
        *_failures(results),
        *_methods(results),
        "## The official test suites\n",
        *_official(official),
    ]
    return NOTE + "\n".join(parts)


def _matrix(results: dict[str, Any]) -> list[str]:
    clients = results["clients"]
    lines = ["## Clients\n", "| column | client | last run | passed | failed | not in this release |", "|---|---|---|---|---|---|"]
    for number, client in enumerate(clients, start=1):
        counts = Counter(outcome["outcome"] for outcome in client["outcomes"].values())
        lines.append(f"| {number} | {client['name']} | {client['date']} | {counts['pass']} | {counts['fail']} | {counts['absent']} |")
    columns = " | ".join(str(number) for number in range(1, len(clients) + 1))
    lines += ["\n## Scenarios\n", f"| scenario | {columns} |", "|---" * (len(clients) + 1) + "|"]
    for scenario, sentence in results["scenarios"].items():
        marks = [_MARKS[client["outcomes"].get(scenario, {"outcome": "absent"})["outcome"]] for client in clients]
        lines.append(f"| `{scenario}`: {sentence} | {' | '.join(marks)} |")
    return [*lines, ""]


def _failures(results: dict[str, Any]) -> list[str]:
    lines = []
    for client in results["clients"]:
        for scenario, outcome in client["outcomes"].items():
            if outcome["outcome"] == "fail":
                last = (outcome["detail"].strip().splitlines() or ["no detail"])[-1]
                lines.append(f"- `{scenario}` with {client['name']}: {last}")
    return ["### What failed\n", *lines, ""] if lines else []


def _methods(results: dict[str, Any]) -> list[str]:
    lines = ["## Public methods of the newest releases\n", "Found by introspection; a method that no scenario calls fails the run.\n"]
    for name, counts in results["methods"].items():
        missing = ", ".join(f"`{method}`" for method in counts["not_called"]) or "none"
        lines.append(f"- {name}: {counts['called']} of {counts['public']} called; not called: {missing}")
    return [*lines, ""]


def _official(runs: list[dict[str, Any]]) -> list[str]:
    if not runs:
        return ["No run is recorded.\n"]
    lines = ["| suite | version | date | how | passed | failed | skipped |", "|---|---|---|---|---|---|---|"]
    for run in runs:
        cells = (run[key] for key in ("suite", "version", "date", "how", "passed", "failed", "skipped"))
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    lines.append("")
    for run in runs:
        if run["failures"]:
            lines += [f"### {run['suite']} {run['version']}: what fails, and why\n"]
            lines += [f"- `{failure['test']}`: {failure['reason']}" for failure in run["failures"]]
            lines.append("")
    return lines
