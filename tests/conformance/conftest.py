"""Runs each client once per session; `AENV_CONFORMANCE=all` means every client and writes the results for the docs."""

from __future__ import annotations

import json
import os

import pytest
import results
from catalogue import EVERYTHING, NEWEST_CLIENTS, Client
from e2e_node import Node, free_port
from runner import Run, Runs, run

DOMAIN = "sbx.localhost"
if EVERYTHING:  # before the node starts: the oldest releases know no other way to a server; the others go on using one host
    os.environ.setdefault("AENV_API_DOMAIN", f"{DOMAIN}:{free_port()}")


@pytest.fixture(scope="session")
def run_of(node: Node, request: pytest.FixtureRequest) -> Runs:
    """All outcomes of a client; the first call runs its scenarios, which takes about a minute."""
    done: dict[Client, Run] = {}

    def of(client: Client) -> Run:
        if client not in done:
            if client.is_interpreter:
                request.getfixturevalue("interpreter_node")
            variables = _by_domain(node) if client.domain else node.variables
            done[client] = run(client, list(client.scenarios), variables, record=client in NEWEST_CLIENTS)
            if EVERYTHING:
                results.write(done.values())
        return done[client]

    return of


def _by_domain(node: Node) -> dict[str, str]:
    """What a client needs that reaches the node by names under its domain."""
    told: dict[str, str | None] = json.loads(node.aenv("env", "--domain", "--json").stdout)
    variables = {name: value for name, value in told.items() if value is not None}
    return {**variables, "CONFORMANCE_LOCAL_SUFFIX": "." + DOMAIN}
