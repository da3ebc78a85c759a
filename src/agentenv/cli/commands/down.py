"""`aenv down`: stop the node."""

from __future__ import annotations

import click

from agentenv.cli.output import info
from agentenv.cli.verb import verb


@verb("down", section="Node")
@click.option("--kill", "kill_sandboxes", is_flag=True, help="Kill the sandboxes instead of pausing them.")
def command(kill_sandboxes: bool) -> None:
    """Pause every sandbox and stop the node.

    Then the server, the storage daemon and the networks end. Nothing is lost: paused sandboxes are there again after
    the next `aenv up`, and `aenv resume` continues them. With --kill running and paused sandboxes are killed for good.
    May be repeated.
    """
    from agentenv import wiring
    from agentenv.cli.node import config_in_force, remove_record
    from agentenv.cli.server import start_lock, stop

    config = config_in_force()
    with start_lock(config):
        stop(config, info)
        wiring.shut_down(config, kill_sandboxes, info)
        remove_record(config)
    info("the node is down")
