"""Puts the figures of `bench.json` into docs/how-fast-and-why.md, between its two marks: `.venv/bin/python tests/bench/page.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from where import STEPS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-fast-and-why.md"
BEGIN, END = "<!-- figures: made by tests/bench/page.py -->", "<!-- end of figures -->"
_VERBS = {
    "create": "create -> first output",
    "resume": "resume -> first output",
    "rollback": "rollback -> first output",
    "checkpoint": "checkpoint",
    "snapshot": "snapshot",
    "pause": "pause",
    "kill": "kill",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def figures(result: dict[str, Any]) -> str:
    """All tables of one run; parts that it left out are left out."""
    parts = [f"{result['n']} samples one at a time, {result['cores']} cores, {result['seconds'] / 60:.0f} minutes in all. Times in ms."]
    if "one" in result:
        parts += _verbs(result)
    if "ready" in result:
        ready = result["ready"]
        ratio = ready["create"]["p50_ms"] / ready["limit"]["p50_ms"]
        parts.append(
            f"A create that wakes a VM which stands ready, with its first output: p50 {_ms(ready['create'])}, p95 "
            f"{_ms(ready['create'], 'p95_ms')}, {ratio:.2f} x the limit in turn with it ({_ms(ready['limit'])})."
        )
    if "forks" in result:
        rows = [
            (
                count,
                _ms(of["fork_call"]),
                _ms(of["fork"]),
                *(f"{of[key]['p50_ms'] / int(count):.0f}" for key in ("fork", "fork_paused", "creates")),
            )
            for count, of in result["forks"].items()
        ]
        head = ("children of a fork", "the call", "until all answer", "per child", "per child, source paused", "as many creates, each")
        parts.append(table(head, rows))
    if "where" in result:
        parts.append(_where(result["where"]))
    if "memory" in result:
        parts += _memory(result["memory"])
    rows = [(name, f"{of['found']:.2f}", f"{of['bound']:.2f}", "yes" if _holds(of) else "**no**") for name, of in _bounds(result)]
    parts.append(table(("bound", "found", "at most (proxy, disk reads: at least)", "holds"), rows))
    return "\n".join(part if part.endswith("\n") else part + "\n" for part in parts)


def _bounds(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    sources = (result, result.get("proxy", {}), result.get("blocks", {}))
    return [item for source in sources for item in source.get("bounds", {}).items()]


def _holds(of: dict[str, Any]) -> bool:
    return bool(of["found"] >= of["bound"] if of["sense"] == "at least" else of["found"] <= of["bound"])


def _ms(of: dict[str, float], share: str = "p50_ms") -> str:
    return f"{of[share]:.0f}"


def _verbs(result: dict[str, Any]) -> list[str]:
    one, many = result["one"], result["many"]
    sizes = list(many)
    rows = []
    for verb, name in {"limit": "the limit: bare VMM -> first output", **_VERBS}.items():
        ratio = f"{one[verb]['p50_ms'] / one['limit']['p50_ms']:.2f}" if verb in ("create", "resume", "rollback") else ""
        write = f"{one[f'write_{verb}']['p50_ms']:.1f}" if f"write_{verb}" in one else ""
        crowds = [
            " / ".join(_ms(many[size][verb], share) for share in ("p50_ms", "p95_ms", "p99_ms")) if verb in many[size] else ""
            for size in sizes
        ]
        rows.append((name, _ms(one[verb]), _ms(one[verb], "p95_ms"), ratio, write, *crowds))
    head = ("what", "p50", "p95", "x the limit", "writing as much to a file", *(f"{size} at once: p50 / p95 / p99" for size in sizes))
    cpu_ms = one["limit_cpu"]["p50_ms"]
    ideal = ", ".join(f"{int(size) * cpu_ms / result['cores']:.0f} for {size}" for size in sizes)
    return [
        table(head, rows),
        f"CPU time of the limit: {cpu_ms:.0f}, so ideal queueing until the last of many has its output: {ideal or 'not measured'}.",
    ]


def _where(found: dict[str, dict[str, float]]) -> str:
    rows = [(f"`{step}`: {what}", *(_cell(of.get(step)) for of in found.values())) for step, what in STEPS.items()]
    rows.append(("the whole call", *(_cell(of["whole"]) for of in found.values())))
    return table(("step, p50", *found), rows)


def _cell(took_ms: float | None) -> str:
    return "" if took_ms is None else f"{took_ms:.1f}"


def _memory(found: dict[str, Any]) -> list[str]:
    pauses = [(f"{row['captured_mb']:.0f} MB", f"{row['pause_p50_ms']:.0f}", f"{row['write_p50_ms']:.0f}") for row in found["pause"]]
    loop, idle = found["tracking"], found["idle"]
    return [
        table(("pause, by memory it wrote", "p50", "writing as much to a file"), pauses),
        f"A loop in a guest that writes to each page of {loop['mb']:.0f} MiB: {loop['own']:.0f} on pages of its own, "
        f"{loop['after_checkpoint']:.0f} right after a checkpoint, {loop['after_resume']:.0f} right after a resume.",
        f"An idle sandbox holds {idle['pss_without_code_cache_mb']:.0f} MiB (PSS), of which {idle['guest_private_mb']:.0f} MiB are guest "
        f"memory of its own, and {idle['code_cache_mb']:.0f} MiB of the emulator's code cache.",
    ]


def main() -> None:
    """Rewrite the page's figures."""
    source = Path("bench.json")
    if not source.is_file():
        sys.exit("there is no bench.json here: run `make bench` first")
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE} lacks the marks between which the figures go")
    PAGE.write_text(f"{before}{BEGIN}\n\n{figures(json.loads(source.read_text()))}\n{END}{after}")
    print(f"wrote: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
