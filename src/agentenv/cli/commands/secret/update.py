"""`aenv secret update`: store another value of a secret."""

from __future__ import annotations

import click

from agentenv.cli.output import print_json
from agentenv.cli.secret_value import read_value
from agentenv.cli.verb import json_option, pairs_option, verb


@verb("update", section="Volumes and secrets")
@click.argument("secret")
@pairs_option("--metadata", "Metadata in place of what is stored (repeatable).")
@json_option
def command(secret: str, metadata: dict[str, str], as_json: bool) -> None:
    """Store another value of SECRET and print its version.

    SECRET is a name or an id.

    The value is read from standard input, or asked for on a terminal.
    """
    from agentenv.cli.api import Api

    body: dict[str, object] = {"value": read_value(secret)}
    if metadata:
        body["metadata"] = metadata
    with Api() as api:
        updated = api.update_secret(secret, body)
    if as_json:
        print_json(updated)
    else:
        click.echo(updated["currentVersion"])
