"""`aenv secret delete`: forget secrets."""

from __future__ import annotations

import click

from agentenv.cli.verb import verb


@verb("delete", section="Volumes and secrets", aliases=("rm",))
@click.argument("secrets", nargs=-1, required=True, metavar="SECRET...")
def command(secrets: tuple[str, ...]) -> None:
    """Forget secrets, by name or id."""
    from agentenv.cli.api import Api

    with Api() as api:
        for secret in secrets:
            api.delete_secret(secret)
            click.echo(secret)
