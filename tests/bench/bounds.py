"""The table that says which bounds hold. For the parts of the bench."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def run(measure: Callable[[], dict[str, Any]], report: Callable[[dict[str, Any]], bool]) -> None:
    """One part of the bench by itself: measure, report, print the bounds as JSON. Exits 1 when one is broken."""
    result = measure()
    good = report(result)
    Console(stderr=True).print_json(json.dumps(result["bounds"]))
    sys.exit(0 if good else 1)


def report(out: Console, title: str, bounds: Mapping[str, tuple[float, str]], found: Iterable[float]) -> tuple[dict[str, Any], bool]:
    """Print each bound (`at least` or `at most`) beside what was found, in the same order; returns both by name, and whether all hold."""
    table = Table(title=title)
    for column in ("what", "found", "bound", ""):
        table.add_column(column, justify="left" if column == "what" else "right")
    rows, good = {}, True
    for (name, (bound, sense)), value in zip(bounds.items(), found, strict=True):
        holds = value >= bound if sense == "at least" else value <= bound
        good &= holds
        table.add_row(name, f"{value:.2f}", f"{sense} {bound:.2f}", "holds" if holds else "BROKEN")
        rows[name] = {"found": value, "bound": bound, "sense": sense}
    out.print(table)
    return rows, good
