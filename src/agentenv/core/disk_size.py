"""How large a disk may be asked for: no smaller than what it is made from, since a file system here never shrinks."""

from __future__ import annotations

from dataclasses import replace

from agentenv.core.errors import InvalidInput
from agentenv.core.model import Machine

FIELD = "diskSizeMB"
"""What the API calls it, in requests as in answers."""


def check_most(asked_mb: int | None, most_mb: int) -> None:
    """InvalidInput when it is more than the node gives to one sandbox. None asks for nothing."""
    if asked_mb is not None and asked_mb > most_mb:
        hint = f"ask for {most_mb} or less, or raise limits.disk_mb_of_sandbox"
        raise InvalidInput(f"{FIELD}: {asked_mb} is more than this node gives to one sandbox", hint)


def with_disk(machine: Machine, asked_mb: int | None, made_from: str) -> Machine:
    """The machine with a disk of that size, MiB; None keeps its own. InvalidInput when it is less than `made_from` has."""
    if asked_mb is None:
        return machine
    if asked_mb < machine.disk_mb:
        hint = "ask for as much or more, or for nothing to have the same; a disk takes only the room of what is written"
        raise InvalidInput(f"{FIELD}: {asked_mb} is less than the {machine.disk_mb} of {made_from}, and disks do not shrink", hint)
    return replace(machine, disk_mb=asked_mb)
