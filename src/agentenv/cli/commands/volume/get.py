"""`aenv volume get`: read a file of a volume."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import click

from agentenv.cli.verb import verb


@verb("get", section="Volumes and secrets")
@click.argument("volume")
@click.argument("path")
@click.argument("file", required=False)
def command(volume: str, path: str, file: str | None) -> None:
    """Copy the file PATH of VOLUME (name or id) to FILE.

    FILE is - for standard output; without it the file keeps its name and comes into the current folder.
    """
    from agentenv.cli.api import Api

    target = file or PurePosixPath(path).name or "-"
    with Api() as api:
        chunks = api.read_volume_file(api.volume(volume), path)
        first = next(chunks, b"")  # before FILE is touched: there may be nothing to copy
        with click.open_file(target, "wb") as out:
            out.write(first)
            for chunk in chunks:
                out.write(chunk)
    if target != "-":
        click.echo(Path(target))
