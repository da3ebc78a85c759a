"""`aenv volume delete`: delete volumes with all they hold."""

from __future__ import annotations

import click

from agentenv.cli.verb import verb


@verb("delete", section="Volumes and secrets", aliases=("rm",))
@click.argument("volumes", nargs=-1, required=True, metavar="VOLUME...")
def command(volumes: tuple[str, ...]) -> None:
    """Delete volumes, by name or id, with all they hold.

    Also while sandboxes mount them; their programs then find the files gone.
    """
    from agentenv.cli.api import Api

    with Api() as api:
        for volume in volumes:
            volume_id = api.volume(volume)["volumeID"]
            api.delete_volume(volume_id)
            click.echo(volume_id)
