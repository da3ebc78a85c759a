"""Spans: where the time of one call goes, by the name of its steps.

Whoever serves a call opens a `recording`; steps below it, also in tasks they start, add to it with `span`. Without a recording a
span costs next to nothing. Names are short words of `[a-z_]`, each used by one step of the code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: Milliseconds by name. A step that ran several times, or for several sandboxes side by side, counts with all of them.
Spans = dict[str, float]

_current: ContextVar[Spans | None] = ContextVar("spans", default=None)


@contextmanager
def recording() -> Iterator[Spans]:
    """Collect the spans of the body. What its background tasks do later still adds to the result."""
    spans: Spans = {}
    token = _current.set(spans)
    try:
        yield spans
    finally:
        _current.reset(token)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Count the time of the body, also of one that fails, under `name`."""
    spans = _current.get()
    if spans is None:
        yield
        return
    began_ns = time.monotonic_ns()
    try:
        yield
    finally:
        spans[name] = spans.get(name, 0.0) + (time.monotonic_ns() - began_ns) / 1e6


def server_timing(spans: Spans) -> str:
    """As the value of a `Server-Timing` header (milliseconds, in the order the steps ended)."""
    return ", ".join(f"{name};dur={took_ms:.1f}" for name, took_ms in spans.items())
