"""`aenv rollback`: a sandbox becomes again what it was."""

from __future__ import annotations

import click

from agentenv.cli.output import busy
from agentenv.cli.verb import id_argument, verb


@verb("rollback", section="Sandboxes")
@id_argument
@click.argument("checkpoint", required=False, metavar="[CHECKPOINT]")
def command(sandbox_id: str, checkpoint: str | None) -> None:
    """Bring a sandbox back to a checkpoint, by its id or name.

    Without CHECKPOINT it is the newest one that its present state descends from. Memory, processes and disk are as they
    were then; id, address and tokens stay. Open connections end. A paused sandbox stays paused.
    """
    from agentenv.cli.api import Api

    with Api() as api, busy(f"rolling back {sandbox_id}"):
        full_id = api.full_id(sandbox_id)
        api.rollback(full_id, checkpoint)
    click.echo(full_id)
