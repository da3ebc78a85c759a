"""`aenv pause`: put sandboxes to sleep."""

from __future__ import annotations

import click

from agentenv.cli.many import each
from agentenv.cli.verb import durable_option, ids_argument, verb


@verb("pause", section="Sandboxes", aliases=("ps",))
@ids_argument()
@click.option("--no-memory", is_flag=True, help="Keep the disk alone: smaller, and `aenv resume` boots it; programs are gone.")
@durable_option
def command(ids: tuple[str, ...], no_memory: bool, durable: bool) -> None:
    """Put sandboxes to sleep.

    Their memory and disk are kept, the host's CPU and memory are given back. `aenv resume` continues them where they were.
    """
    from agentenv.cli.api import Api

    with Api() as api:

        def pause(given: str) -> str:
            sandbox_id = api.full_id(given)
            api.pause(sandbox_id, memory=not no_memory, durable=durable)
            return sandbox_id

        each(ids, pause, "pausing")
