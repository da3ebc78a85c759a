from __future__ import annotations

from agentenv.core.lifecycle import CAPTURING, TRANSITIONS, VISIBLE, State, is_allowed

_MODULES = {"create", "delete", "pause", "resume", "fork", "snapshot", "rollback"}


def test_every_state_is_reached_from_creating() -> None:
    reached = {State.CREATING}
    for _ in State:
        reached |= {new for (old, new) in TRANSITIONS if old in reached}
    assert reached == set(State)


def test_killed_is_the_end_and_every_other_state_leads_to_it() -> None:
    assert not [new for (old, new) in TRANSITIONS if old is State.KILLED]
    reaching = {State.KILLED}
    for _ in State:
        reaching |= {old for (old, new) in TRANSITIONS if new in reaching}
    assert reaching == set(State)


def test_every_state_but_the_ended_ones_has_a_visible_name() -> None:
    assert set(VISIBLE) == set(State) - {State.KILLING, State.KILLED}
    assert set(VISIBLE.values()) == {"running", "paused"}


def test_actions_are_named_after_modules_of_the_orchestrator() -> None:
    assert set(TRANSITIONS.values()) == _MODULES


def test_a_state_between_two_others_can_go_back_or_be_killed() -> None:
    """Whatever fails half-way has a legal way out."""
    for state, rest in (
        *((state, State.RUNNING) for state in CAPTURING),
        (State.RESUMING, State.PAUSED),
        (State.ROLLING_BACK, State.RUNNING),
    ):
        assert is_allowed(state, rest)
        assert is_allowed(state, State.KILLING)
    assert is_allowed(State.CREATING, State.KILLING)


def test_what_is_not_in_the_table_is_not_allowed() -> None:
    assert not is_allowed(State.KILLED, State.RUNNING)
    assert not is_allowed(State.PAUSED, State.RUNNING)
    assert not any(is_allowed(state, state) for state in State)
