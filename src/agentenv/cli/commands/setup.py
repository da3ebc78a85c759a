"""`aenv setup`: make a Debian or Ubuntu host a production node."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agentenv.cli.exits import CliError
from agentenv.cli.output import info, warn
from agentenv.cli.verb import verb


@verb("setup", section="Node")
@click.option("--dry-run", is_flag=True, help="Print the whole plan, contents of files included, and do nothing.")
@click.option("--yes", "-y", "agreed", is_flag=True, help="Do not ask.")
@click.option("--remove", is_flag=True, help="Take away what `aenv setup` put in place, and nothing else.")
@click.option("--no-packages", is_flag=True, help="Install no packages.")
@click.option("--no-start", is_flag=True, help="Do not start the service now.")
@click.option("--program", type=click.Path(path_type=Path, dir_okay=False), help="The `aenv` that the service runs.  [default: this one]")
@click.option(
    "--root", type=click.Path(path_type=Path, file_okay=False, exists=True), default="/", help="Another root file system to set up."
)
def command(dry_run: bool, agreed: bool, remove: bool, no_packages: bool, no_start: bool, program: Path | None, root: Path) -> None:
    """Set this Debian or Ubuntu host up for production.

    Installs packages, has kernel modules loaded and kernel settings set, now and at boot, makes the node's home, and has the node
    run as a service of systemd. Shows its plan and asks first. May be repeated: what is there already is left as it is.
    """
    from agentenv.cli.node import load_config, read_record
    from agentenv.host.setup_apply import apply_plan, take_back
    from agentenv.host.setup_plan import make_plan

    config = load_config()
    root = root.absolute()
    if remove:
        server = read_record(config) if root == Path("/") else None
        if server is not None and server.is_alive():
            raise CliError(f"the node is up (pid {server.pid})", "`aenv down` pauses its sandboxes and ends it; then repeat")
        _ask(agreed, "Take the set-up back?")
        take_back(root, info)
        return
    plan = make_plan(root, config.node.home.absolute(), program or Path(sys.executable).parent / "aenv", not no_packages, not no_start)
    for line in plan.lines():
        click.echo(line)
    if plan.is_empty:
        info("nothing is to be done")
    if dry_run or plan.is_empty:
        return
    _ask(agreed, "Do this?")
    apply_plan(plan, info)
    if root == Path("/"):
        _tell_what_is_left()


def _ask(agreed: bool, question: str) -> None:
    """CliError when nobody can be asked; ends the command when the answer is no."""
    if agreed:
        return
    if not sys.stdin.isatty():
        raise CliError("nobody can be asked here", "look at the plan with --dry-run, then use --yes")
    click.confirm(question, abort=True, err=True)


def _tell_what_is_left() -> None:
    from agentenv.cli.node import load_config
    from agentenv.host.production import production_checks

    lacking = [check for check in production_checks(load_config()) if check.need == "needed" and check.status != "ok"]
    for check in lacking:
        warn(f"still missing for production: {check.name}: {check.detail}; {check.hint}")
    info("`aenv doctor --production` checks everything")
