"""`aenv reload`: a new server in place of the running one."""

from __future__ import annotations

from agentenv.cli.output import ProgressReport, info
from agentenv.cli.verb import verb


@verb("reload", section="Node")
def command() -> None:
    """Replace the server by a new one, losing no request.

    The new one has the installed version and configuration. Connections wait until it accepts them, streams that are open go on in
    the old one until they end (at most api.drain_minutes), sandboxes do not notice. It is made ready first; if that fails, the old
    one goes on. Addresses, ports and home stay as they are, and built-in templates are left alone; `aenv down` and `aenv up` change
    those.
    """
    from agentenv.cli.node import config_in_force
    from agentenv.cli.succession import replace_server

    with ProgressReport() as progress:
        former, now = replace_server(config_in_force(), progress)
    info(f"the server is pid {now.pid} now; pid {former.pid} ends when the streams it has end")
