"""`aenv image push`: publish a template's root file system as an image."""

from __future__ import annotations

import click

from agentenv.cli.output import ProgressReport, print_json
from agentenv.cli.registry_account import account_options, read_account
from agentenv.cli.verb import json_option, verb


@verb("push", section="Images")
@click.argument("template")
@click.argument("name")
@account_options
@json_option
def command(template: str, name: str, username: str | None, password_stdin: bool, as_json: bool) -> None:
    """Publish a template's disk as an image.

    The digest of the image NAME is printed.

    The image has the template's user, folder and variables, and layers in overlaybd's native form: nodes start from it
    while it is still in the registry. Layers that the registry has are not sent again.
    """
    from agentenv.cli.api import Api

    registry = read_account(username, password_stdin)
    with Api() as api, ProgressReport() as report:
        pushed = api.push_image(template, name, registry, report)
    if as_json:
        print_json(pushed)
    else:
        click.echo(pushed["digest"])
