"""`aenv fork`: branch a sandbox."""

from __future__ import annotations

import sys

import click

from agentenv.cli.exits import Exit
from agentenv.cli.output import busy, fail, print_json
from agentenv.cli.verb import id_argument, json_option, verb


@verb("fork", section="Sandboxes")
@id_argument
@click.option("--count", type=click.IntRange(1, 100), default=1, show_default=True, help="How many copies.")
@click.option(
    "--timeout", "timeout_s", type=click.IntRange(1), default=300, show_default=True, metavar="S", help="Life of each copy, seconds."
)
@json_option
def command(sandbox_id: str, count: int, timeout_s: int, as_json: bool) -> None:
    """Branch a sandbox into running copies.

    The copies go on from this instant, memory included; their ids are printed. The original goes on (or stays paused).
    Each copy starts or fails by itself; the exit code is 1 when any failed.
    """
    from agentenv.cli.api import Api, without_secrets

    with Api() as api, busy(f"forking {sandbox_id}"):
        outcomes = api.fork(api.full_id(sandbox_id), count, timeout_s)
    errors = [outcome["error"] for outcome in outcomes if outcome.get("error")]
    if as_json:
        print_json([{"sandbox": without_secrets(o["sandbox"])} if o.get("sandbox") else {"error": o["error"]} for o in outcomes])
    else:
        for outcome in outcomes:
            if outcome.get("sandbox"):
                click.echo(outcome["sandbox"]["sandboxID"])
    for error in errors:
        fail(f"one copy did not start: {error['message']}")
    if errors:
        sys.exit(Exit.FAILURE)
