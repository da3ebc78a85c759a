"""`aenv volume create`: a new empty volume."""

from __future__ import annotations

import click

from agentenv.cli.output import print_json
from agentenv.cli.verb import json_option, verb


@verb("create", section="Volumes and secrets")
@click.argument("name")
@json_option
def command(name: str, as_json: bool) -> None:
    """Make an empty volume and print its id.

    NAME is made of letters, digits, - and _. Sandboxes mount the volume by that name.
    """
    from agentenv.cli.api import Api

    with Api() as api:
        made = api.create_volume(name)
    if as_json:
        print_json({key: made[key] for key in ("volumeID", "name")})
    else:
        click.echo(made["volumeID"])
