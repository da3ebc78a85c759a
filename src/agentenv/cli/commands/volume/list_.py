"""`aenv volume list`: the node's volumes."""

from __future__ import annotations

from agentenv.cli.output import info, print_json, print_table
from agentenv.cli.verb import json_option, verb


@verb("list", section="Volumes and secrets", aliases=("ls",))
@json_option
def command(as_json: bool) -> None:
    """List the volumes, oldest first."""
    from agentenv.cli.api import Api

    with Api() as api:
        found = api.volumes()
    if as_json:
        print_json(found)
    elif found:
        print_table(("NAME", "ID"), [(item["name"], item["volumeID"]) for item in found])
    else:
        info("no volumes; `aenv volume create NAME` makes one")
