"""Runs each client once per session; `AENV_CONFORMANCE=all` means every client and writes the results for the docs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import results
from catalogue import EVERYTHING, FAST_JAVASCRIPT, NEWEST_CLIENTS, SCENARIOS, Client
from e2e_node import Node
from runner import Run, Runs, run


@pytest.fixture(scope="session")
def run_of(node: Node) -> Iterator[Runs]:
    """All outcomes of a client; the first call runs its scenarios, which takes about a minute."""
    done: dict[Client, Run] = {}

    def of(client: Client) -> Run:
        if client not in done:
            wanted = SCENARIOS if EVERYTHING or client.kind != "javascript" else FAST_JAVASCRIPT
            done[client] = run(client, list(wanted), node.variables, record=client in NEWEST_CLIENTS)
        return done[client]

    yield of
    if EVERYTHING:
        results.write(done.values())
