"""`aenv doctor`: can this machine be a node, and is it one?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from agentenv.cli.exits import Exit
from agentenv.cli.output import clean, info, print_json, styled
from agentenv.cli.verb import json_option, verb

if TYPE_CHECKING:
    from agentenv.host.doctor import Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


_TITLES = {
    "sandboxes": "What sandboxes need",
    "installation": "This installation",
    "production needed": "What production needs",
    "production advised": "What is advised for production",
}


@verb("doctor", section="Node")
@click.option("--production", is_flag=True, help="Exit code 1, too, when something is missing that production needs.")
@json_option
def command(production: bool, as_json: bool) -> None:
    """Check the host, the installation and the server.

    Changes nothing. Exit code 0 when sandboxes can run here (there may be warnings), 1 when a check failed. What a
    production node needs, or should have, is shown with the command that brings it; `aenv setup` does all of it.
    """
    from agentenv.cli.checks import product_checks
    from agentenv.cli.node import config_in_force
    from agentenv.host.doctor import host_checks
    from agentenv.host.production import production_checks

    config = config_in_force()
    checks = [*host_checks(config), *product_checks(config), *production_checks(config)]
    failed = [check.name for check in checks if check.status == "fail"]
    lacking = [check.name for check in checks if check.group == "production" and check.need == "needed" and check.status != "ok"]
    if as_json:
        print_json(checks)
    else:
        _show(checks)
        info(f"not ready: {', '.join(failed)}" if failed else "ready")
        info(f"not ready for production: {', '.join(lacking)}" if lacking else "ready for production")
    if failed or (production and lacking):
        sys.exit(Exit.FAILURE)


def _show(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    title = ""
    for check in checks:
        heading = _TITLES[f"{check.group} {check.need}" if check.group == "production" else check.group]
        if heading != title:
            click.echo(f"{chr(10) if title else ''}{styled(heading, sys.stdout, bold=True)}")
            title = heading
        status = styled(check.status.ljust(4), sys.stdout, fg=_COLOURS[check.status])
        click.echo(f"{status}  {check.name.ljust(width)}  {clean(check.detail)}")
        if check.hint and check.status != "ok":
            click.echo(f"      {' ' * width}  -> {clean(check.hint)}")
