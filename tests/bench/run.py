"""`make bench`: what the product costs beside the limit, both measured in turn in one run.

Prints tables and writes `bench.json`; ends with 1 when a bound is broken or a call failed. Ratios are what counts: single times are this
machine's. The parts: `verbs`, `forks`, `ready`, `memory` and `where` (a node with real guests), `proxy`, and `blocks` (blockd alone).
`AENV_BENCH_N` sets the number of samples (default 100, about a quarter of an hour; with 10 some minutes), `AENV_BENCH_PARTS` runs some
parts alone, such as `verbs,forks`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import blocks
import bounds
import forks
import memory
import proxy
import ready
import where
from samples import COMMAND, Crowd, N, err, step
from verbs import many_at_once, one_at_a_time

from limit import Bare, for_node, restore_and_run
from local_node import AENV, node

PARTS = ("verbs", "forks", "ready", "memory", "where", "proxy", "blocks")
CORES = len(os.sched_getaffinity(0))
T = TypeVar("T")


def wanted() -> tuple[str, ...]:
    """The parts to run."""
    named = tuple(part for part in os.environ.get("AENV_BENCH_PARTS", "").replace(" ", "").split(",") if part)
    if unknown := set(named) - set(PARTS):
        sys.exit(f"AENV_BENCH_PARTS: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return named or PARTS


@contextmanager
def node_with(warm_sandboxes: int) -> Iterator[None]:
    """A node that keeps so many VMs ready of each template in use, named by the environment."""
    os.environ["AENV_WARM_SANDBOXES"] = str(warm_sandboxes)
    with node() as variables:
        os.environ.update(variables)
        try:
            yield
        finally:  # what a part that broke off has left running
            subprocess.run([str(AENV), "kill", "--all"], check=False, stdout=subprocess.DEVNULL)


class Run:
    """What was measured so far, by part. A part that breaks off is a failure, and the others go on."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts, self.crowd = parts, Crowd()
        self.result: dict[str, Any] = {"n": N, "cores": CORES}

    def part(self, name: str, key: str, work: Callable[[], Any]) -> None:
        """Do `work` if the part `name` is wanted; its result becomes `key`."""
        if name not in self.parts:
            return
        try:
            self.result[key] = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost what was measured before
            self.crowd.failures.append(f"{name}: {type(error).__name__}: {error}")
            err.print_exception()

    def everything(self) -> None:
        """All parts that are wanted."""
        crowd = self.crowd
        if set(self.parts) & {"verbs", "where", "forks", "memory", "proxy"}:
            with node_with(warm_sandboxes=0):
                self.part("verbs", "one", lambda: beside_the_limit(partial(one_at_a_time, crowd)))
                self.part("verbs", "many", lambda: many_at_once(crowd))
                self.part("where", "where", where.measure)
                self.part("forks", "forks", lambda: forks.measure(crowd))
                self.part("memory", "memory", memory.measure)
                self.part("proxy", "proxy", proxy.measure)
        if "ready" in self.parts:
            with node_with(warm_sandboxes=1):
                self.part("ready", "ready", lambda: beside_the_limit(partial(ready.measure, crowd)))
        self.part("blocks", "blocks", blocks.measure)


def beside_the_limit(work: Callable[[Bare], T]) -> T:
    """Work that measures the limit, too."""
    from agentenv.config.load import load

    step("make flat files for the bare VMM")
    bare = for_node(load())
    try:
        restore_and_run(bare, COMMAND)  # warms the page cache for both sides
        return work(bare)
    finally:
        bare.close()


def ideal_ms(one: dict[str, Any], size: int) -> float:
    """When the last of `size` starts at once has given its first output if only the bare VMM's CPU time counted, on all cores."""
    return float(size * one["limit_cpu"]["p50_ms"] / CORES)


def held(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """What was found, and the most it may be, by bound."""
    found: dict[str, tuple[float, float]] = {}
    one, many, ready_vm = result.get("one"), result.get("many", {}), result.get("ready")
    if one:
        limit = one["limit"]["p50_ms"]
        found["create -> first output, ratio to the limit"] = (one["create"]["p50_ms"] / limit, 1.2)
        found["resume -> first output, ratio to the limit"] = (one["resume"]["p50_ms"] / limit, 1.2)
        found["rollback -> first output, ratio to resume"] = (one["rollback"]["p50_ms"] / one["resume"]["p50_ms"], 1.0)
        for verb in ("pause", "snapshot", "checkpoint"):
            most_ms = 1.5 * one[f"write_{verb}"]["p50_ms"] + 20
            found[f"{verb}, ratio to 1.5 x writing as much to a file + 20 ms"] = (one[verb]["p50_ms"] / most_ms, 1.0)
    if one and "50" in many:
        found["create, p99 of 50 at once, ratio to ideal queueing"] = (many["50"]["create"]["p99_ms"] / ideal_ms(one, 50), 3.0)
    if ready_vm:
        found["create from a VM that stands ready, ratio to the limit"] = (ready_vm["create"]["p50_ms"] / ready_vm["limit"]["p50_ms"], 1.0)
    for row in result.get("memory", {}).get("pause", ()):
        most_ms = 1.5 * row["write_p50_ms"] + 20
        found[f"pause at {row['captured_mb']:.0f} MB, ratio to 1.5 x writing as much + 20 ms"] = (row["pause_p50_ms"] / most_ms, 1.0)
    if one and "1" in result.get("forks", {}):
        single = result["forks"]["1"]["fork"]["p50_ms"]
        for count in (key for key in result["forks"] if key != "1"):
            further = (result["forks"][count]["fork"]["p50_ms"] - single) / (int(count) - 1)
            found[f"each further child of a fork into {count}, ratio to a create"] = (further / one["create"]["p50_ms"], 0.8)
    return found


def report(result: dict[str, Any], failures: list[str]) -> bool:
    """Print the tables; True when every stated bound holds and nothing failed."""
    out = Console()
    if "one" in result:
        out.print(_verbs_table(result["one"]))
        for size, found in result.get("many", {}).items():
            out.print(_many_table(result["one"], size, found))
    if "where" in result:
        where.report(result["where"])
    if "ready" in result:
        out.print(_ready_table(result["ready"]))
    if "forks" in result:
        out.print(_forks_table(result["forks"]))
    if "memory" in result:
        memory.report(result["memory"])
    found = held(result)
    most = {name: (bound, "at most") for name, (_, bound) in found.items()}
    result["bounds"], good = bounds.report(out, "bounds", most, (value for value, _ in found.values()))
    if "proxy" in result:
        good = proxy.report(result["proxy"]) and good
    if "blocks" in result:
        good = blocks.report(result["blocks"]) and good
    result["failures"] = failures
    for failure in failures:
        out.print(f"FAILED: {failure}", markup=False, highlight=False)
    return good and not failures


NAMES = {
    "limit": "the limit: bare VMM -> first output",
    "limit_cpu": "CPU time of that",
    "create": "create -> first output",
    "resume": "resume -> first output",
    "rollback": "rollback -> first output",
    "checkpoint": "checkpoint",
    "snapshot": "snapshot",
    "pause": "pause",
    "kill": "kill",
}


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _verbs_table(one: dict[str, Any]) -> Table:
    table = _table(f"one at a time, n = {one['limit']['n']} in turn", "what", "p50 ms", "p95 ms", "ratio to the limit", "a file, ms")
    for key, name in NAMES.items():
        ratio = f"{one[key]['p50_ms'] / one['limit']['p50_ms']:.2f}" if key in ("create", "resume", "rollback") else ""
        write = one.get(f"write_{key}")
        beside = "" if write is None else f"{write['p50_ms']:.1f} ({one['captured_bytes'][key] / 1e6:.1f} MB)"
        table.add_row(name, f"{one[key]['p50_ms']:.0f}", f"{one[key]['p95_ms']:.0f}", ratio, beside)
    return table


def _many_table(one: dict[str, Any], size: str, found: dict[str, Any]) -> Table:
    ideal = ideal_ms(one, int(size))
    title = f"{size} at once, n = {found['create']['n']}; ideal queueing of a start on {CORES} cores: {ideal:.0f} ms"
    table = _table(title, "what", "p50 ms", "p95 ms", "p99 ms", "p99 to ideal")
    for key, name in NAMES.items():
        if key in found:
            ratio = f"{found[key]['p99_ms'] / ideal:.2f}" if key in ("create", "resume", "rollback") else ""
            table.add_row(name, *(f"{found[key][share]:.0f}" for share in ("p50_ms", "p95_ms", "p99_ms")), ratio)
    return table


def _ready_table(found: dict[str, Any]) -> Table:
    table = _table(f"from a VM that stands ready, n = {found['create']['n']} in turn", "what", "p50 ms", "p95 ms", "ratio to the limit")
    limit = found["limit"]["p50_ms"]
    for key in ("limit", "create"):
        row = found[key]
        table.add_row(NAMES[key], f"{row['p50_ms']:.0f}", f"{row['p95_ms']:.0f}", f"{row['p50_ms'] / limit:.2f}")
    return table


def _forks_table(found: dict[str, Any]) -> Table:
    columns = (
        "children",
        "the call, ms",
        "until all answer, ms",
        "per child, ms",
        "source paused, per child, ms",
        "creates at once, each, ms",
    )
    table = _table("forks, p50", *columns)
    for count, of in found.items():
        each = (of[key]["p50_ms"] / int(count) for key in ("fork", "fork_paused", "creates"))
        table.add_row(count, f"{of['fork_call']['p50_ms']:.0f}", f"{of['fork']['p50_ms']:.0f}", *(f"{value:.0f}" for value in each))
    return table


def main() -> None:
    """Measure everything and report. Exits 1 when a bound is broken."""
    run, began = Run(wanted()), time.monotonic()
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "150")  # or a log would have tables as narrow as 80
    if "proxy" in run.parts:
        proxy.require_programs()
    if set(run.parts) - {"blocks"} and subprocess.run([str(AENV), "ls", "--json"], check=False, capture_output=True).returncode == 0:
        sys.exit("bench: the node is up, with settings and sandboxes of its own; stop it first: aenv down")
    run.everything()
    result = run.result
    good = report(result, run.crowd.failures)
    result["seconds"] = time.monotonic() - began
    Path("bench.json").write_text(json.dumps(result, indent=1) + "\n")
    step(f"done in {result['seconds'] / 60:.1f} minutes, see bench.json")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
