"""What people and scripts see: data on stdout, everything else on stderr.

Invariants: text that came from elsewhere (metadata, logs, names) is shown without control characters, so it cannot
steer the terminal; JSON is one document, or one per line where the output is a stream; colour and live progress bars
appear only on a terminal, and never with NO_COLOR or TERM=dumb (then progress is plain lines).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BUSY_AFTER_S = 0.7
"""What takes less than this needs no word."""
PLAIN_PROGRESS_INTERVAL_S = 5.0
"""How often a step repeats its figures in plain mode: a log stays readable, a watcher sees that it moves."""


def info(text: str) -> None:
    """A message for the person at the terminal."""
    click.echo(clean(text), err=True)


def warn(text: str) -> None:
    """A message that deserves attention."""
    click.echo(f"{styled('warning:', sys.stderr, fg='yellow')} {clean(text)}", err=True)


def fail(message: str, hint: str = "") -> None:
    """An error, and the next step on a line of its own."""
    click.echo(f"{styled('error:', sys.stderr, fg='red', bold=True)} {clean(message)}", err=True)
    if hint:
        click.echo(f"{styled('hint:', sys.stderr, fg='cyan')} {clean(hint)}", err=True)


@contextlib.contextmanager
def busy(doing: str) -> Iterator[None]:
    """Shows on a terminal what is being done while the block runs, once it takes long enough to wonder; nothing stays on the screen."""
    if not is_fancy(sys.stderr):
        yield
        return
    done = threading.Event()
    shower = threading.Thread(target=_show_busy, args=(clean(doing), done), daemon=True)
    shower.start()
    try:
        yield
    finally:
        done.set()
        shower.join()


def _show_busy(doing: str, done: threading.Event) -> None:
    if done.wait(BUSY_AFTER_S):
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(doing)):
        done.wait()


def print_json(value: Any) -> None:
    """One JSON document on stdout, indented for people."""
    click.echo(json.dumps(value, indent=2, default=_plain, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """One JSON document on one line, flushed, for streams."""
    click.echo(json.dumps(value, default=_plain, ensure_ascii=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns on stdout, never cut off: what is shown can be copied."""
    cells = [list(header), *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def limited(items: Iterable[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """The first `limit` items, all when it is 0; says when there are more."""
    found = list(islice(items, limit + 1 if limit else None))
    if limit and len(found) > limit:
        info(f"there are more than {limit}: --limit N shows more, --limit 0 all")
        found.pop()
    return found


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    """`name  value` lines on stdout."""
    width = max((len(name) for name, _ in fields), default=0)
    for name, value in fields:
        click.echo(f"{name.ljust(width)}  {clean(value)}".rstrip())


def clean(text: str) -> str:
    """`text` with every control and other unprintable character but newline and tab replaced."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def is_fancy(stream: TextIO) -> bool:
    """Whether `stream` is a terminal on which colour and redrawing are welcome."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")


def styled(text: str, stream: TextIO, **style: Any) -> str:
    """`text` in colour where `stream` shows it."""
    return click.style(text, **style) if is_fancy(stream) else text


def when(timestamp: str) -> str:
    """An RFC 3339 time of the API for people: `2026-01-31 12:00:00 UTC`."""
    return datetime.fromisoformat(timestamp).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float) -> str:
    """A length of time for people: `45s`, `12m`, `3h 5m`, `2d 4h`."""
    left = max(0, int(seconds))
    if left < 60:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m"
    if left < 86400:
        return f"{left // 3600}h {left % 3600 // 60}m"
    return f"{left // 86400}d {left % 86400 // 3600}h"


def size(size_bytes: float) -> str:
    """A number of bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be shown as JSON")


class ProgressReport:
    """Shows `report(step, done, total)` calls on stderr: bars on a terminal, plain lines elsewhere.

    Calls may come from any thread. `step` is a text that ends in the unit when there are figures, as in
    "fetch kernel (bytes)". Use it as a context manager; leaving it ends the bars and leaves them on the screen.
    """

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._lines: dict[str, float] = {}

    def __enter__(self) -> ProgressReport:
        if is_fancy(sys.stderr):
            self._bars = _make_bars()
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            if kind is None:
                for task in self._bars.tasks:
                    self._finish(task.id)
            self._bars.stop()

    def __call__(self, step: str, done: int | None = None, total: int | None = None) -> None:
        """Show how far `step` is."""
        if self._bars is None:
            self._show_line(step, done, total)
        else:
            self._show_bar(self._bars, step, done, total)

    def _show_bar(self, bars: Progress, step: str, done: int | None, total: int | None) -> None:
        if step not in self._tasks:
            for earlier in self._tasks.values():
                self._finish(earlier)
            self._tasks[step] = bars.add_task(_step_name(step), total=total, figures="")
        bars.update(self._tasks[step], completed=done or 0, total=total, figures=_figures(step, done, total))

    def _finish(self, task: TaskID) -> None:
        """The next step has begun, so this one is done even if it never told its size."""
        if self._bars is not None and not self._bars.tasks[task].finished:
            total = self._bars.tasks[task].total or 1
            self._bars.update(task, total=total, completed=total)

    def _show_line(self, step: str, done: int | None, total: int | None) -> None:
        now = time.monotonic()
        is_end = done is not None and done == total
        last = self._lines.get(step)
        if last is not None and not (is_end and last >= 0) and now - abs(last) < PLAIN_PROGRESS_INTERVAL_S:
            return
        if last is not None and last < 0:  # its end has been shown
            return
        self._lines[step] = -now if is_end else now
        figures = _figures(step, done, total)
        info(f"{_step_name(step)}{': ' + figures if figures else ''}")


def _make_bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def _step_name(step: str) -> str:
    return step.removesuffix(" (bytes)")


def _figures(step: str, done: int | None, total: int | None) -> str:
    if done is None:
        return ""
    show = size if step.endswith("(bytes)") else str
    return show(done) if total is None else f"{show(done)} / {show(total)}"
