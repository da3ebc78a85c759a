"""`aenv snapshot list`: what was kept."""

from __future__ import annotations

import click

from agentenv.cli.output import info, limited, print_json, print_table
from agentenv.cli.verb import LIST_LIMIT, format_option, verb


@verb("list", section="Sandboxes", aliases=("ls",))
@click.argument("sandbox_id", required=False, metavar="[ID]")
@click.option("--name", "-n", metavar="NAME", help="Only this snapshot (name or id, also with a tag: NAME:TAG).")
@click.option("--limit", "-l", type=click.IntRange(0), default=LIST_LIMIT, show_default=True, metavar="N", help="At most N; 0 means all.")
@format_option("-f")
def command(sandbox_id: str | None, name: str | None, limit: int, as_json: bool) -> None:
    """List snapshots, those of a sandbox or all."""
    from agentenv.cli.api import Api

    with Api() as api:
        found = limited(api.snapshots(sandbox_id, name), limit)
    if as_json:
        print_json(found)
    elif found:
        print_table(("ID", "NAMES"), [(item["snapshotID"], ", ".join(item.get("names") or ["-"])) for item in found])
    else:
        info("no snapshots match" if sandbox_id or name else "no snapshots; `aenv snapshot create ID` makes one")
