"""The `aenv` command: finds the commands, and turns every failure into a message, a hint and an exit code.

Each command is one module of `cli.commands` that holds `command`, a `Verb`; there is no list to keep. Modules are read
when needed, and heavy imports (HTTP, configuration, the E2B SDK) sit inside the functions that use them, so that
`aenv --help` answers at once.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import click

import agentenv.cli.commands as commands_package
from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import fail
from agentenv.cli.verb import SECTIONS, Verb
from agentenv.core.errors import AgentEnvError, InvalidInput, NotFound


class Commands(click.Group):
    """The group of all commands, read from the modules of `cli.commands`; a module `verb` or `verb_` is `aenv verb`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, sorted."""
        return sorted(module.name.rstrip("_") for module in pkgutil.iter_modules(commands_package.__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        names = {module.name.rstrip("_"): module.name for module in pkgutil.iter_modules(commands_package.__path__)}
        if cmd_name not in names:
            return None
        command: Verb = import_module(f"{commands_package.__name__}.{names[cmd_name]}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but a mistyped command says where the list is."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise CliError(error.format_message(), "`aenv --help` lists the commands", Exit.USAGE) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by section, in the order of `SECTIONS`."""
        verbs = [verb for name in self.list_commands(ctx) if isinstance(verb := self.get_command(ctx, name), Verb)]
        for section in SECTIONS:
            rows = [(verb.name or "", verb.get_short_help_str(70)) for verb in verbs if verb.section == section]
            with formatter.section(section):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; failures end here."""
        try:
            return super().invoke(ctx)
        except CliError as error:
            fail(error.message, error.hint)
            ctx.exit(error.code)
        except AgentEnvError as error:
            fail(error.message, error.hint)
            ctx.exit(exit_code(error))
        except (KeyboardInterrupt, click.Abort):
            fail("interrupted")
            ctx.exit(Exit.INTERRUPTED)


def exit_code(error: AgentEnvError) -> Exit:
    """The exit code of an error of ours."""
    if isinstance(error, InvalidInput):
        return Exit.USAGE
    return Exit.NOT_FOUND if isinstance(error, NotFound) else Exit.FAILURE


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Real Linux microVMs for agents: start, run, pause, fork and restart them on this machine.

    Begin with `aenv up --detach`, then `aenv start` and `aenv exec ID -- COMMAND`.
    """


def main() -> None:
    """Entry point of the `aenv` program."""
    cli(prog_name="aenv")
