"""Unchanged releases of the official clients, old and new, through the scenarios of the catalogue."""

from __future__ import annotations

import pytest
from catalogue import CLI_SCENARIOS, CLIENTS, EVERYTHING, INTERPRETER_SCENARIOS, KNOWN_LIMITS, NEWEST_CLIENTS, SCENARIOS, Client
from runner import Runs

CHOSEN = [client for client in CLIENTS if EVERYTHING or client.fast]


@pytest.mark.timeout(3600)  # of all scenarios together; each has its own deadline
@pytest.mark.parametrize("client", CHOSEN, ids=lambda client: client.name)
def test_client(client: Client, run_of: Runs):
    outcomes = run_of(client).outcomes
    assert outcomes, "the client told nothing"
    failed = {outcome.scenario: outcome.detail for outcome in outcomes if outcome.outcome == "fail"}
    known = {scenario for name, scenario in KNOWN_LIMITS if name == client.name}
    assert set(failed) == known, "\n\n".join(f"{scenario}:\n{detail}" for scenario, detail in failed.items() if scenario not in known)
    assert sum(outcome.outcome == "pass" for outcome in outcomes) >= len(client.scenarios) / 3


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("client", [client for client in CHOSEN if client in NEWEST_CLIENTS], ids=lambda client: client.name)
def test_every_public_method_is_called(client: Client, run_of: Runs):
    """A new release's new method shows up here."""
    recorded = run_of(client)
    if EVERYTHING or client.kind != "javascript":  # the fast JavaScript run is a part of the scenarios only
        assert len(recorded.public) > 70
        assert sorted(set(recorded.public) - set(recorded.called)) == []


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "scenarios", [SCENARIOS, *([INTERPRETER_SCENARIOS, CLI_SCENARIOS] if EVERYTHING else [])], ids=lambda names: min(names)
)
def test_some_client_passes_every_scenario(scenarios: dict[str, str], run_of: Runs):
    """A scenario that no client implements would be a row of nothing."""
    outcomes = [outcome for client in CHOSEN if set(client.scenarios) <= set(scenarios) for outcome in run_of(client).outcomes]
    assert {outcome.scenario for outcome in outcomes if outcome.outcome == "pass"} == set(scenarios)
