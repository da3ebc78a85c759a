"""`aenv snapshot create`: keep a sandbox as it is now."""

from __future__ import annotations

import click

from agentenv.cli.output import busy, print_json
from agentenv.cli.verb import durable_option, id_argument, json_option, verb


@verb("create", section="Sandboxes", aliases=("cr",))
@id_argument
@click.option("--name", "-n", metavar="NAME", help="Its name; taken again, it gets this as its newest build.")
@durable_option
@json_option
def command(sandbox_id: str, name: str | None, durable: bool, as_json: bool) -> None:
    """Keep a sandbox as it is now.

    Memory and disk are kept and the sandbox goes on. What is printed names a template: `aenv start` makes sandboxes
    from it that go on from this instant.
    """
    from agentenv.cli.api import Api

    with Api() as api, busy(f"keeping {sandbox_id}"):
        made = api.create_snapshot(api.full_id(sandbox_id), name, durable=durable)
    if as_json:
        print_json(made)
    else:
        click.echo(made["snapshotID"])
