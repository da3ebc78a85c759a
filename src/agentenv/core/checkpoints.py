"""The tree of a sandbox's checkpoints: finding one, naming a new one, taking one out. Plain values, no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from agentenv.core.errors import Conflict, InvalidInput, NotFound
from agentenv.core.ids import CHECKPOINT_ID
from agentenv.core.model import Checkpoint, Sandbox

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_QUOTED_CHARS = 80  # of the caller's text that an error repeats


def check_name(present: Iterable[Checkpoint], name: str) -> str:
    """`name` if a new checkpoint may have it; empty is none. InvalidInput, Conflict when another of the sandbox has it."""
    if not name:
        return ""
    if not _NAME.fullmatch(name) or CHECKPOINT_ID.fullmatch(name):
        raise InvalidInput(
            f"name: {name[:_QUOTED_CHARS]!r} cannot name a checkpoint",
            "use up to 128 letters, digits, dots, dashes and underscores, beginning with a letter or digit, not in the form of an id",
        )
    if any(checkpoint.name == name for checkpoint in present):
        raise Conflict(f"the sandbox has a checkpoint {name!r} already", "delete that one, or choose another name")
    return name


def named(present: Iterable[Checkpoint], sandbox_id: str, reference: str) -> Checkpoint:
    """The checkpoint of that id or name. NotFound."""
    for checkpoint in present:
        if reference in (checkpoint.checkpoint_id, checkpoint.name or checkpoint.checkpoint_id):
            return checkpoint
    raise NotFound(
        f"sandbox {sandbox_id} has no checkpoint {reference[:_QUOTED_CHARS]!r}",
        f"GET /sandboxes/{sandbox_id}/checkpoints lists those it has; one of another sandbox is of no use to it",
    )


def target(present: Iterable[Checkpoint], sandbox: Sandbox, reference: str) -> Checkpoint:
    """Where a rollback goes: the checkpoint of that id or name, or the one the sandbox's state descends from. NotFound, InvalidInput."""
    wanted = reference or sandbox.checkpoint_id
    if not wanted:
        raise InvalidInput(
            f"sandbox {sandbox.sandbox_id} has no checkpoint to go back to", f"take one: POST /sandboxes/{sandbox.sandbox_id}/checkpoints"
        )
    return named(present, sandbox.sandbox_id, wanted)


def orphans(present: Iterable[Checkpoint], removed: Checkpoint) -> list[Checkpoint]:
    """The children of a checkpoint that goes, as they are afterwards: its parent is theirs."""
    return [replace(child, parent_id=removed.parent_id) for child in present if child.parent_id == removed.checkpoint_id]
