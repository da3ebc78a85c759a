"""`aenv secret create`: store a new secret."""

from __future__ import annotations

import click

from agentenv.cli.output import print_json
from agentenv.cli.secret_value import read_value
from agentenv.cli.verb import json_option, pairs_option, verb


@verb("create", section="Volumes and secrets")
@click.argument("name")
@pairs_option("--metadata", "Metadata to keep with it (repeatable).")
@json_option
def command(name: str, metadata: dict[str, str], as_json: bool) -> None:
    """Store a secret and print its id.

    The value is read from standard input, or asked for on a terminal.
    """
    from agentenv.cli.api import Api

    value = read_value(name)
    with Api() as api:
        made = api.create_secret({"name": name, "value": value, "metadata": metadata})
    if as_json:
        print_json(made)
    else:
        click.echo(made["secretID"])
