"""`aenv volume put`: write a file of a volume."""

from __future__ import annotations

from pathlib import Path

import click

from agentenv.cli.verb import verb


@verb("put", section="Volumes and secrets")
@click.argument("volume")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.argument("path", required=False)
def command(volume: str, file: str, path: str | None) -> None:
    """Copy FILE (- for standard input) to PATH in VOLUME.

    Missing folders are made; without PATH the file keeps its name. It appears in the volume when all of it is there.
    """
    from agentenv.cli.api import Api

    if path is None:
        if file == "-":
            raise click.UsageError("give the PATH that standard input goes to")
        path = Path(file).name
    with Api() as api, click.open_file(file, "rb") as source:
        written = api.write_volume_file(api.volume(volume), path, source)
    click.echo(written["path"])
