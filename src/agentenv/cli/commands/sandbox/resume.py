"""`aenv resume`: continue paused sandboxes."""

from __future__ import annotations

import click

from agentenv.cli.many import each
from agentenv.cli.verb import ids_argument, verb


@verb("resume", section="Sandboxes", aliases=("rs",))
@ids_argument()
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(1),
    metavar="S",
    help="Let them live at least S seconds more.  [default: what they were created with, at least 300]",
)
@click.option("--no-memory", is_flag=True, help="Boot from the disk; what the memory held is dropped, programs are gone.")
def command(ids: tuple[str, ...], timeout_s: int | None, no_memory: bool) -> None:
    """Continue paused sandboxes where they were.

    One that runs already goes on; its life is never shortened.
    """
    from agentenv.cli.api import Api

    with Api() as api:

        def resume(given: str) -> str:
            sandbox_id = api.full_id(given)
            api.connect(sandbox_id, timeout_s, memory=not no_memory)
            return sandbox_id

        each(ids, resume, "resuming")
