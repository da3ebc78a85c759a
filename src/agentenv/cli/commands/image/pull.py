"""`aenv image pull`: bring an image from its registry."""

from __future__ import annotations

import click

from agentenv.cli.output import ProgressReport, print_json
from agentenv.cli.registry_account import account_options, read_account
from agentenv.cli.verb import json_option, verb


@verb("pull", section="Images")
@click.argument("name")
@account_options
@json_option
def command(name: str, username: str | None, password_stdin: bool, as_json: bool) -> None:
    """Bring the image NAME from its registry and print its digest.

    NAME is [registry/]name[:tag] or [registry/]name@sha256:..., as other container tools have it. What is here as the
    registry has it now is not brought again. Template builds bring the images they need by themselves.
    """
    from agentenv.cli.api import Api

    registry = read_account(username, password_stdin)
    with Api() as api, ProgressReport() as report:
        image = api.pull_image(name, registry, report)
    if as_json:
        print_json(image)
    else:
        click.echo(image["digest"])
