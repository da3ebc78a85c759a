"""How long one request of the HTTP client (httpcore) to a program of this host may take."""

from __future__ import annotations


def all_within(deadline_s: float) -> dict[str, float]:
    """The `timeout` extension of a request each of whose steps may take so many seconds."""
    return dict.fromkeys(("connect", "read", "write", "pool"), deadline_s)
