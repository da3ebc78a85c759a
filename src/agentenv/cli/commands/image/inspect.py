"""`aenv image inspect`: everything the node knows of an image."""

from __future__ import annotations

import json
from typing import Any

import click

from agentenv.cli.output import print_fields, print_json, print_table, size, when
from agentenv.cli.verb import json_option, verb


@verb("inspect", section="Images")
@click.argument("image")
@json_option
def command(image: str, as_json: bool) -> None:
    """Show one image in full.

    Its names, what it says about running it, and its layers, the lowest first. IMAGE is a name, a digest, or the beginning of a digest.
    """
    from agentenv.cli.api import Api

    with Api() as api:
        found = api.image(image)
        uses = {layer["layerID"]: layer["users"] for layer in api.layers()}
    if as_json:
        print_json(found)
        return
    print_fields(_fields(found))
    rows = [(layer["layerID"], size(layer["sizeBytes"]), str(len(uses.get(layer["layerID"], ())))) for layer in found["layers"]]
    print_table(("LAYER", "SIZE", "USERS"), rows)


def _fields(image: dict[str, Any]) -> list[tuple[str, str]]:
    config = {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for name, value in image["config"].items()}
    return [
        ("names", ", ".join(image["names"])),
        ("digest", image["digest"]),
        ("platform", image["platform"]),
        ("size", size(image["sizeBytes"])),
        ("made", when(image["createdAt"])),
        ("used", when(image["usedAt"])),
        *config.items(),
    ]
