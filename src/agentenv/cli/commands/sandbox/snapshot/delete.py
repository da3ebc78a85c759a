"""`aenv snapshot delete`: forget snapshots."""

from __future__ import annotations

import click

from agentenv.cli.many import each
from agentenv.cli.verb import verb


@verb("delete", section="Sandboxes", aliases=("rm", "dl"))
@click.argument("snapshot_ids", nargs=-1, required=True, metavar="ID...")
def command(snapshot_ids: tuple[str, ...]) -> None:
    """Forget snapshots.

    The ids of those that are gone are printed. One that sandboxes still run from, or are paused on, stays.
    """
    from agentenv.cli.api import Api

    with Api() as api:

        def delete(given: str) -> str:
            api.delete_template(given)
            return given

        each(snapshot_ids, delete, "deleting")
