"""`aenv image import`: bring an image that is a file or folder of this machine."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import click

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import ProgressReport, print_json
from agentenv.cli.verb import json_option, verb

_CHUNK_BYTES = 1 << 18


@verb("import", section="Images")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("name")
@json_option
def command(source: Path, name: str, as_json: bool) -> None:
    """Bring the image in SOURCE as NAME and print its digest.

    SOURCE is the folder of an OCI layout, an archive of one, an archive as `docker save` writes it, or a root file system in
    one archive (compressed or not). Template builds that start from NAME then ask no registry.
    """
    from agentenv.cli.api import Api

    with Api() as api, ProgressReport() as report, _opened(source) as content:
        image = api.import_image(name, _chunks(content, source, report), report)
    if as_json:
        print_json(image)
    else:
        click.echo(image["digest"])


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[IO[bytes]]:
    """The archive, or an archive of the folder that is made as it is read."""
    if source.is_file():
        with source.open("rb") as file:
            yield file
        return
    if not (source / "index.json").is_file():
        raise CliError(f"{source} is no OCI layout: it has no index.json", "`skopeo copy ... oci:FOLDER` writes one", Exit.USAGE)
    with subprocess.Popen(["tar", "-C", source, "-cf", "-", "."], stdout=subprocess.PIPE) as archiver:
        try:
            assert archiver.stdout is not None
            yield archiver.stdout
        finally:
            archiver.kill()


def _chunks(content: IO[bytes], source: Path, report: Callable[..., object]) -> Iterator[bytes]:
    total = source.stat().st_size if source.is_file() else None
    done = 0
    while chunk := content.read(_CHUNK_BYTES):
        yield chunk
        done += len(chunk)
        report(f"send {source.name} (bytes)", done, total)
