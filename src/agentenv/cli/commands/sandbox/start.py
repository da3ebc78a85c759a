"""`aenv start`: make a sandbox and leave it running."""

from __future__ import annotations

import sys
from typing import Any

import click

from agentenv.cli.creation import Wish, check, create, creation_options, show
from agentenv.cli.output import info
from agentenv.cli.verb import verb


@verb("start", section="Sandboxes")
@creation_options
@click.option("--shell", is_flag=True, help="Open a shell in it at once; it stays when the shell ends.")
def command(shell: bool, as_json: bool, **wanted: Any) -> None:
    """Start a sandbox and print its id.

    TEMPLATE is the name or id of a template, `base` when not given. It is what `aenv create --detach` does.
    """
    from agentenv.cli.api import Api
    from agentenv.cli.terminal import require_terminal

    check(wish := Wish(**wanted))
    if shell and as_json:
        raise click.UsageError("--shell and --json exclude each other")
    if shell:
        require_terminal()
    with Api() as api:
        made = create(api, wish)
        if shell:
            from agentenv.cli.shell import run_shell

            info(f"sandbox {made['sandboxID']}")
            sys.exit(run_shell(api, made["sandboxID"]))
    show(made, as_json)
