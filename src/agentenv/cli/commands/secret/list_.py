"""`aenv secret list`: the node's secrets, without their values."""

from __future__ import annotations

from agentenv.cli.output import info, print_json, print_table
from agentenv.cli.verb import json_option, verb


@verb("list", section="Volumes and secrets", aliases=("ls",))
@json_option
def command(as_json: bool) -> None:
    """List the secrets, newest first, without their values."""
    from agentenv.cli.api import Api

    with Api() as api:
        found = list(api.secrets())
    if as_json:
        print_json(found)
    elif found:
        rows = [
            (
                item["name"],
                item["secretID"],
                str(item["currentVersion"]),
                item["updatedAt"][:19].replace("T", " "),
                " ".join(f"{key}={value}" for key, value in sorted(item["metadata"].items())),
            )
            for item in found
        ]
        print_table(("NAME", "ID", "VERSION", "UPDATED", "METADATA"), rows)
    else:
        info("no secrets; `aenv secret create NAME` stores one")
