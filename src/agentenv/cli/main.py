"""The `aenv` command: where every verb begins, and where every failure becomes a message, a hint and an exit code.

Heavy imports (HTTP, configuration, the E2B SDK) sit inside the functions that use them, so that `aenv --help` answers
at once.
"""

from __future__ import annotations

from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from agentenv.cli.commands import sandbox
from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import fail
from agentenv.cli.verb import Group
from agentenv.core.errors import AgentEnvError, InvalidInput, NotFound


class Commands(Group):
    """All of `aenv`: its own commands, and those of `sandbox`, whose name may be left out."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command that can be named by one word."""
        return sorted({*super().list_commands(ctx), *sandbox.command.list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; our own come first."""
        return super().get_command(ctx, cmd_name) or sandbox.command.get_command(ctx, cmd_name)

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
        except NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            path = (error.ctx or ctx).command_path
            fail(error.format_message(), f"`{path} --help` shows how it is used")
            ctx.exit(Exit.USAGE)
        except (KeyboardInterrupt, click.Abort):
            fail("interrupted")
            ctx.exit(Exit.INTERRUPTED)


def exit_code(error: AgentEnvError) -> Exit:
    """The exit code of an error of ours."""
    if isinstance(error, InvalidInput):
        return Exit.USAGE
    return Exit.NOT_FOUND if isinstance(error, NotFound) else Exit.FAILURE


cli = Commands(
    "aenv",
    "agentenv.cli.commands",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="""Real Linux microVMs for agents: start, run, pause, fork and restart them on this machine.

    Begin with `aenv up --detach`, then `aenv start` and `aenv exec ID -- COMMAND`.
    """,
)
"""The command tree."""


def main() -> None:
    """Entry point of the `aenv` program."""
    cli(prog_name="aenv")
