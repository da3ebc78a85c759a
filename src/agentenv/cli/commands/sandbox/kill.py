"""`aenv kill`: end sandboxes for good."""

from __future__ import annotations

import click

from agentenv.cli.many import each
from agentenv.cli.output import info
from agentenv.cli.verb import verb


@verb("kill", section="Sandboxes")
@click.argument("ids", nargs=-1, metavar="ID...")
@click.option("--all", "kill_all", is_flag=True, help="Every sandbox, running or paused.")
def command(ids: tuple[str, ...], kill_all: bool) -> None:
    """End sandboxes for good.

    Running or paused ones; the ids of those that were killed are printed.
    """
    from agentenv.cli.api import Api

    if kill_all == bool(ids):
        raise click.UsageError("give the ids of sandboxes, or --all")
    with Api() as api:
        if kill_all:
            ids = tuple(item["sandboxID"] for item in api.sandboxes())
            if not ids:
                info("no sandboxes")

        def kill(given: str) -> str:
            sandbox_id = api.full_id(given)
            api.kill(sandbox_id)
            return sandbox_id

        each(ids, kill)
