"""The states of a sandbox and every legal move between them.

This table is the only place where moves are listed: `store` refuses any other, and the diagram in the docs is made from it.
A move names the *action* that makes it, which is also the name of the orchestrator's module for that verb.
`killed` is the end: the row stays for a while so that late questions get a good answer, its resources are gone.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a sandbox is in its life."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    FORKING = "forking"
    SNAPSHOTTING = "snapshotting"
    ROLLING_BACK = "rolling back"
    KILLING = "killing"
    KILLED = "killed"


TRANSITIONS: dict[tuple[State, State], str] = {
    (State.CREATING, State.RUNNING): "create",
    (State.CREATING, State.KILLING): "delete",
    (State.RUNNING, State.PAUSING): "pause",
    (State.PAUSING, State.PAUSED): "pause",
    (State.PAUSING, State.RUNNING): "pause",  # the capture failed, the VM goes on
    (State.PAUSING, State.KILLING): "delete",
    (State.PAUSED, State.RESUMING): "resume",
    (State.RESUMING, State.RUNNING): "resume",
    (State.RESUMING, State.PAUSED): "resume",  # the restore failed, the snapshot is untouched
    (State.RUNNING, State.FORKING): "fork",
    (State.FORKING, State.RUNNING): "fork",
    (State.FORKING, State.KILLING): "delete",
    (State.RUNNING, State.SNAPSHOTTING): "snapshot",
    (State.SNAPSHOTTING, State.RUNNING): "snapshot",
    (State.SNAPSHOTTING, State.KILLING): "delete",
    (State.RUNNING, State.ROLLING_BACK): "rollback",
    (State.ROLLING_BACK, State.RUNNING): "rollback",  # also when the restore failed: then it goes on as it was
    (State.ROLLING_BACK, State.PAUSED): "rollback",  # the server stopped half-way: it rests at the checkpoint
    (State.ROLLING_BACK, State.KILLING): "delete",
    (State.RUNNING, State.KILLING): "delete",
    (State.PAUSED, State.KILLING): "delete",
    (State.RESUMING, State.KILLING): "delete",
    (State.KILLING, State.KILLED): "delete",
}

#: What the API calls them (contract section 2.3): only two states are visible.
VISIBLE = {
    State.CREATING: "running",
    State.RUNNING: "running",
    State.FORKING: "running",
    State.SNAPSHOTTING: "running",
    State.PAUSING: "paused",
    State.PAUSED: "paused",
    State.RESUMING: "running",
    State.ROLLING_BACK: "running",
}


#: The VM serves connections; in the last two it stands still for a moment, and then goes on.
SERVING = frozenset({State.RUNNING, State.FORKING, State.SNAPSHOTTING})

#: The VM is being captured; whatever comes of that, it must not be left standing still.
CAPTURING = frozenset({State.PAUSING, State.FORKING, State.SNAPSHOTTING})


def is_allowed(old: State, new: State) -> bool:
    """Whether `old` -> `new` is a legal move."""
    return (old, new) in TRANSITIONS
