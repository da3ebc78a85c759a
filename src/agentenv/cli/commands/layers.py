"""`aenv layers`: what the node's disk is filled with, and whether it is what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import ProgressReport, info, print_json, print_table, size
from agentenv.cli.verb import json_option, verb

if TYPE_CHECKING:
    from agentenv.cli.api import Api

_SHOWN_USERS = 3


@verb("layers", section="Images")
@click.argument("action", required=False, type=click.Choice(["verify"]))
@click.argument("ids", nargs=-1, metavar="[LAYER]...")
@json_option
def command(action: str | None, ids: tuple[str, ...], as_json: bool) -> None:
    """List the layers of the node, or compare them with checksums.

    What uses each is listed with it, the largest come first. Images, templates, snapshots and sandboxes are stacks of layers;
    one that several of them share is stored once. One that nothing uses is removed with the next sweep.

    `aenv layers verify` reads all of them (or those named) and compares each with its checksum: that of its blob if it came
    from a registry, else the one that the first look has noted. A damaged one that a registry still has is made anew. Exits
    with 1 if one stays damaged. The node does the same by itself, slowly (storage.verify_mb_per_s).
    """
    from agentenv.cli.api import Api

    with Api() as api:
        if action is not None:
            _verify(api, ids, as_json)
            return
        layers = api.layers()
    if as_json:
        print_json(layers)
        return
    if layers:
        print_table(("LAYER", "SIZE", "USERS", "USED BY"), [_row(layer["layerID"], layer["sizeBytes"], layer["users"]) for layer in layers])
    info(f"{len(layers)} layers, {size(sum(layer['sizeBytes'] for layer in layers))} in all")


def _verify(api: Api, ids: tuple[str, ...], as_json: bool) -> None:
    sizes = {layer["layerID"]: int(layer["sizeBytes"]) for layer in api.layers()}
    unknown = [layer_id for layer_id in ids if layer_id not in sizes]
    if unknown:
        raise CliError(f"there is no layer {unknown[0][:100]!r}", "`aenv layers` lists those there are", Exit.NOT_FOUND)
    wanted, done, found = list(ids or sizes), 0, list[dict[str, Any]]()
    total = sum(sizes[layer_id] for layer_id in wanted)
    with ProgressReport() as report:
        for layer_id in wanted:
            report("compare layers (bytes)", done, total)
            try:
                found.append(api.verify_layer(layer_id))
            except CliError as error:
                if error.code != Exit.NOT_FOUND:  # it went meanwhile
                    raise
            done += sizes[layer_id]
        report("compare layers (bytes)", total, total)
    bad = [layer for layer in found if layer["state"] in ("damaged", "mended")]
    if as_json:
        print_json(found)
    elif bad:
        rows = [(layer["layerID"], layer["state"], ", ".join(layer["users"][:_SHOWN_USERS]) or "-", layer["message"]) for layer in bad]
        print_table(("LAYER", "STATE", "USED BY", "WHAT"), rows)
    info(f"{len(found)} layers compared, {size(total)}: {len(bad)} damaged, {sum(layer['state'] == 'mended' for layer in bad)} made anew")
    if any(layer["state"] == "damaged" for layer in bad):
        raise CliError("there are damaged layers", "pull their images again, or delete what uses them")


def _row(layer_id: str, size_bytes: int, users: list[str]) -> tuple[str, ...]:
    more = [f"and {len(users) - _SHOWN_USERS} more"] if len(users) > _SHOWN_USERS else []
    return layer_id, size(size_bytes), str(len(users)), ", ".join([*users[:_SHOWN_USERS], *more]) or "-"
