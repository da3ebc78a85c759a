"""`aenv completion`: the script that teaches a shell to complete `aenv`."""

from __future__ import annotations

import click

from agentenv.cli.verb import verb


@verb("completion", section="Other")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print what makes a shell complete `aenv`.

    Commands, options and the ids of sandboxes are completed. To have it in every shell:

    \b
        eval "$(aenv completion bash)"      in ~/.bashrc
        eval "$(aenv completion zsh)"       in ~/.zshrc, after compinit
        aenv completion fish > ~/.config/fish/completions/aenv.fish
    """
    from click.shell_completion import BashComplete, FishComplete, ZshComplete

    made = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}[shell]
    click.echo(made(ctx.find_root().command, {}, "aenv", "_AENV_COMPLETE").source())
