"""`aenv checkpoint list`: what a sandbox can go back to."""

from __future__ import annotations

from typing import Any

from agentenv.cli.output import info, print_json, print_table
from agentenv.cli.verb import format_option, id_argument, verb


@verb("list", section="Sandboxes", aliases=("ls",))
@id_argument
@format_option("-f")
def command(sandbox_id: str, as_json: bool) -> None:
    """List the checkpoints of a sandbox as a tree.

    `*` marks the one that its present state descends from.
    """
    from agentenv.cli.api import Api

    with Api() as api:
        found = api.checkpoints(api.full_id(sandbox_id))
    if as_json:
        print_json(found)
    elif found:
        print_table(("CHECKPOINT", "NAME", "KEEPS", "TAKEN"), [_row(item, depth) for item, depth in _tree(found)])
    else:
        info(f"no checkpoints; `aenv checkpoint create {sandbox_id}` takes one")


def _row(item: dict[str, Any], depth: int) -> tuple[str, ...]:
    mark = "* " if item["current"] else "  "
    keeps = "memory and disk" if item["memory"] else "disk"
    return mark + "  " * depth + item["checkpointID"], item["name"] or "-", keeps, item["createdAt"]


def _tree(found: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Each below its parent, with how deep it is."""
    rows: list[tuple[dict[str, Any], int]] = []
    waiting = [(item, 0) for item in reversed(found) if item["parentID"] is None]
    while waiting:
        item, depth = waiting.pop()
        rows.append((item, depth))
        waiting += [(child, depth + 1) for child in reversed(found) if child["parentID"] == item["checkpointID"]]
    return rows
