"""`aenv checkpoint delete`: forget checkpoints."""

from __future__ import annotations

import click

from agentenv.cli.many import each
from agentenv.cli.verb import id_argument, verb


@verb("delete", section="Sandboxes", aliases=("rm", "dl"))
@id_argument
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...")
def command(sandbox_id: str, checkpoints: tuple[str, ...]) -> None:
    """Forget checkpoints of a sandbox, by id or name.

    Those that are gone are printed. Later ones that descend from them stay.
    """
    from agentenv.cli.api import Api

    with Api() as api:
        full_id = api.full_id(sandbox_id)

        def delete(checkpoint: str) -> str:
            api.delete_checkpoint(full_id, checkpoint)
            return checkpoint

        each(checkpoints, delete, "deleting")
