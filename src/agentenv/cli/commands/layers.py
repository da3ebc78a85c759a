"""`aenv layers`: what the node's disk is filled with."""

from __future__ import annotations

from agentenv.cli.output import info, print_json, print_table, size
from agentenv.cli.verb import json_option, verb

_SHOWN_USERS = 3


@verb("layers", section="Images")
@json_option
def command(as_json: bool) -> None:
    """List the layers of the node and what uses each.

    The largest come first. Images, templates, snapshots and sandboxes are stacks of layers; one that several of them
    share is stored once. One that nothing uses is removed with the next sweep.
    """
    from agentenv.cli.api import Api

    with Api() as api:
        layers = api.layers()
    if as_json:
        print_json(layers)
        return
    if layers:
        print_table(("LAYER", "SIZE", "USERS", "USED BY"), [_row(layer["layerID"], layer["sizeBytes"], layer["users"]) for layer in layers])
    info(f"{len(layers)} layers, {size(sum(layer['sizeBytes'] for layer in layers))} in all")


def _row(layer_id: str, size_bytes: int, users: list[str]) -> tuple[str, ...]:
    more = [f"and {len(users) - _SHOWN_USERS} more"] if len(users) > _SHOWN_USERS else []
    return layer_id, size(size_bytes), str(len(users)), ", ".join([*users[:_SHOWN_USERS], *more]) or "-"
