"""`aenv create`: make a sandbox and open a terminal in it, which it lives as long as."""

from __future__ import annotations

import sys
from typing import Any

import click

from agentenv.cli.creation import Wish, check, create, creation_options, show
from agentenv.cli.output import info
from agentenv.cli.verb import verb


@verb("create", section="Sandboxes", aliases=("cr",))
@creation_options
@click.option("--detach", "-d", is_flag=True, help="Open no terminal: print its id and leave it running, as `aenv start` does.")
@click.option("--user", "-u", metavar="NAME", help="User of the terminal.  [default: the template's]")
@click.option("--cwd", "-c", metavar="DIR", help="Working directory of the terminal.  [default: the template's]")
def command(detach: bool, user: str | None, cwd: str | None, as_json: bool, **wanted: Any) -> None:
    """Make a sandbox and open a terminal in it.

    TEMPLATE is the name or id of a template, `base` when not given. The sandbox lives as long as the terminal is open:
    when it is left, the sandbox comes to its end (see --on-timeout), or after the S seconds of --timeout if they were
    given. --json implies --detach.
    """
    from agentenv.cli.api import Api
    from agentenv.cli.terminal import require_terminal

    check(wish := Wish(**wanted))
    if detach or as_json:
        if user or cwd:
            raise click.UsageError("--user and --cwd are about the terminal, which --detach and --json do not open")
        with Api() as api:
            show(create(api, wish), as_json)
        return
    require_terminal("use `aenv create --detach` or `aenv start` in scripts")
    from agentenv.cli.shell import run_shell

    with Api() as api:
        sandbox_id = create(api, wish)["sandboxID"]
        info(f"sandbox {sandbox_id}")
        try:
            code = run_shell(api, sandbox_id, user, cwd)
        finally:
            _leave(api, sandbox_id, wish)
    sys.exit(code)


def _leave(api: Any, sandbox_id: str, wish: Wish) -> None:
    """Let its end come: at once, or when the time has passed that was given by name."""
    from agentenv.cli.exits import CliError, Exit

    try:
        api.set_timeout(sandbox_id, wish.timeout_s or 0)
    except CliError as error:
        if error.code != Exit.NOT_FOUND:  # it may have ended before us, which is as well
            info(f"sandbox {sandbox_id} may live on to its timeout: {error.message}")
        return
    end = "is killed" if wish.on_timeout == "kill" else "is paused"
    info(f"sandbox {sandbox_id} {end}" + (f" in {wish.timeout_s} s" if wish.timeout_s else ""))
