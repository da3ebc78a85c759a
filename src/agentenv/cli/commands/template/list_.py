"""`aenv template list`: what sandboxes can be started from."""

from __future__ import annotations

from typing import Any

import click

from agentenv.cli.output import info, print_json, print_table
from agentenv.cli.verb import format_option, verb


@verb("list", section="Templates", aliases=("ls",))
@click.option("--project", "--team", "-t", "project", hidden=True, help="Ignored: a node is one project.")
@format_option("-f")
def command(project: str | None, as_json: bool) -> None:
    """List the templates."""
    from agentenv.cli.api import Api

    with Api() as api:
        found = api.templates()
    if as_json:
        print_json(found)
        return
    if found:
        print_table(("NAME", "ID", "CPU", "MEMORY", "DISK", "STARTED", "CREATED"), [_row(item) for item in found])
    else:
        info("no templates; `aenv up` builds the base template")


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    return (
        ", ".join(item.get("names") or item.get("aliases") or ["-"]),
        item["templateID"],
        str(item["cpuCount"]),
        f"{item['memoryMB']} MiB",
        f"{item['diskSizeMB']} MiB",
        f"{item.get('spawnCount', 0)} times",
        str(item.get("createdAt", ""))[:19].replace("T", " "),
    )
