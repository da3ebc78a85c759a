"""`aenv checkpoint create`: keep a sandbox as it is now, for itself."""

from __future__ import annotations

import click

from agentenv.cli.output import busy, print_json
from agentenv.cli.verb import durable_option, id_argument, json_option, verb


@verb("create", section="Sandboxes", aliases=("cr",))
@id_argument
@click.option("--name", "-n", metavar="NAME", help="Its name, to roll back to by.")
@click.option("--no-memory", is_flag=True, help="Keep the disk alone: a rollback boots it.")
@durable_option
@json_option
def command(sandbox_id: str, name: str | None, no_memory: bool, durable: bool, as_json: bool) -> None:
    """Keep a sandbox as it is now, for itself to go back to.

    The sandbox goes on. `aenv rollback` brings it back here as often as wanted; the checkpoint ends with the sandbox.
    """
    from agentenv.cli.api import Api

    with Api() as api, busy(f"keeping {sandbox_id}"):
        made = api.create_checkpoint(api.full_id(sandbox_id), name, memory=not no_memory, durable=durable)
    if as_json:
        print_json(made)
    else:
        click.echo(made["checkpointID"])
