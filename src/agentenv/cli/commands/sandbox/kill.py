"""`aenv kill`: end sandboxes for good."""

from __future__ import annotations

import click

from agentenv.cli.many import each
from agentenv.cli.output import info
from agentenv.cli.verb import ids_argument, metadata_filter_option, states_option, verb


@verb("kill", section="Sandboxes", aliases=("rm", "kl"))
@ids_argument(required=False)
@click.option("--all", "-a", "kill_all", is_flag=True, help="Every sandbox that runs, or those the next two name.")
@states_option("With --all: those in these states, e.g. running,paused.  [default: running]")
@metadata_filter_option("With --all: only those with this metadata (repeatable; all must match).")
def command(ids: tuple[str, ...], kill_all: bool, states: str | None, metadata: dict[str, str]) -> None:
    """End sandboxes for good.

    Running or paused ones; the ids of those that were killed are printed.
    """
    from agentenv.cli.api import Api

    if kill_all == bool(ids):
        raise click.UsageError("give the ids of sandboxes, or --all")
    if (states or metadata) and not kill_all:
        raise click.UsageError("--state and --metadata go with --all")
    with Api() as api:
        if kill_all:
            wanted = states or "running"
            ids = tuple(item["sandboxID"] for item in api.sandboxes(wanted, metadata))
            if not ids:
                info(f"no {' or '.join(wanted.split(','))} sandboxes{' with this metadata' if metadata else ''}")
            if not states and any(True for _ in api.sandboxes("paused", metadata)):
                info("paused ones are left; `aenv kill --all --state running,paused` ends them too")

        def kill(given: str) -> str:
            sandbox_id = api.full_id(given)
            api.kill(sandbox_id)
            return sandbox_id

        each(ids, kill, "killing")
