"""`aenv start`: make a sandbox."""

from __future__ import annotations

import sys
from typing import Any

import click

from agentenv.cli.output import info, print_json
from agentenv.cli.verb import json_option, pairs_option, verb


@verb("start", section="Sandboxes")
@click.argument("template", default="base")
@click.option("--timeout", "timeout_s", type=click.IntRange(1), metavar="S", help="End it after S seconds.  [default: 300]")
@pairs_option("--env", "Set an environment variable in the sandbox (repeatable).")
@pairs_option("--metadata", "Attach metadata (repeatable); `aenv ls --metadata` finds it.")
@click.option("--on-timeout", type=click.Choice(["kill", "pause"]), default="kill", show_default=True, help="What happens at its end.")
@click.option("--shell", is_flag=True, help="Open a shell in it at once.")
@json_option
def command(
    template: str, timeout_s: int | None, env: dict[str, str], metadata: dict[str, str], on_timeout: str, shell: bool, as_json: bool
) -> None:
    """Start a sandbox and print its id.

    TEMPLATE is the name or id of a template, `base` when not given.
    """
    from agentenv.cli.api import Api, without_secrets
    from agentenv.cli.terminal import require_terminal

    if shell and as_json:
        raise click.UsageError("--shell and --json exclude each other")
    if shell:
        require_terminal()
    body: dict[str, Any] = {"templateID": template, "envVars": env, "metadata": metadata, "autoPause": on_timeout == "pause"}
    if timeout_s is not None:
        body["timeout"] = timeout_s
    with Api() as api:
        try:
            made = api.create(body)
        except KeyboardInterrupt:
            info("the sandbox may start all the same; `aenv ls` shows it")
            raise
        if shell:
            from agentenv.cli.shell import run_shell

            info(f"sandbox {made['sandboxID']}")
            sys.exit(run_shell(api, made["sandboxID"]))
    if as_json:
        print_json(without_secrets(made))
    else:
        click.echo(made["sandboxID"])
