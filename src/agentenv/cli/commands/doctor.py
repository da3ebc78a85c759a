"""`aenv doctor`: can this machine be a node, and is it one?"""

from __future__ import annotations

import sys

import click

from agentenv.cli.exits import Exit
from agentenv.cli.output import clean, info, print_json, styled
from agentenv.cli.verb import json_option, verb

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@verb("doctor", section="Node")
@json_option
def command(as_json: bool) -> None:
    """Check the host, the installation and the server.

    Changes nothing. Exit code 0 when sandboxes can run here (there may be warnings), 1 when a check failed.
    """
    from agentenv.cli.checks import product_checks
    from agentenv.cli.node import config_in_force
    from agentenv.host.doctor import host_checks

    config = config_in_force()
    checks = [*host_checks(config), *product_checks(config)]
    failed = [check.name for check in checks if check.status == "fail"]
    if as_json:
        print_json(checks)
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            status = styled(check.status.ljust(4), sys.stdout, fg=_COLOURS[check.status])
            click.echo(f"{status}  {check.name.ljust(width)}  {clean(check.detail)}")
            if check.hint and check.status != "ok":
                click.echo(f"      {' ' * width}  -> {clean(check.hint)}")
        info(f"not ready: {', '.join(failed)}" if failed else "ready")
    if failed:
        sys.exit(Exit.FAILURE)
