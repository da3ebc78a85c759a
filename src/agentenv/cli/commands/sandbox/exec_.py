"""`aenv exec`: run a command in a sandbox."""

from __future__ import annotations

import shlex
import sys

import click

from agentenv.cli.verb import Verb, id_argument, user_options, verb


class PassingOn(Verb):
    """What stands behind the id belongs to the command, options too; a line that begins with `-` there can only be meant for us."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, after finding out where the command begins."""
        ctx.allow_interspersed_args = False
        words = self.make_parser(ctx).parse_args(list(args))[0].get("words")
        ctx.allow_interspersed_args = isinstance(words, tuple) and words[:1] != ("--",) and words[0].startswith("-")
        return super().parse_args(ctx, args)


@verb("exec", section="Inside a sandbox", aliases=("ex",), cls=PassingOn)
@id_argument
@user_options
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=0, metavar="S", help="Kill it after S seconds.  [default: no limit]"
)
@click.option("--background", "-b", is_flag=True, help="Print its process id in the sandbox and leave it running.")
@click.option("--no-stdin", "-n", is_flag=True, help="Do not read standard input (as `ssh -n`; needed in `while read` loops).")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def command(
    sandbox_id: str,
    user: str | None,
    cwd: str | None,
    env: dict[str, str],
    timeout_s: float,
    background: bool,
    no_stdin: bool,
    words: tuple[str, ...],
) -> None:
    """Run a command in a sandbox.

    Everything after ID belongs to the command. Several words are taken as they are; a single one is a line for the
    shell, as in

    \b
        aenv exec ID -- 'ls *.py | wc -l'

    Standard output and error come apart and byte for byte, standard input is passed on when it is not a terminal, and
    the exit code is the command's (128 + N when signal N ended it). Ctrl-C kills it. It ends with the sandbox.
    """
    from agentenv.cli.api import Api
    from agentenv.cli.dataplane import open_sandbox
    from agentenv.cli.remote_command import RemoteCommand

    if words[0] == "--":
        words = words[1:]
    if not words:
        raise click.UsageError("no command is given")
    if background and timeout_s:
        raise click.UsageError("--timeout cannot be kept with --background, as nobody waits for the command")
    line = words[0] if len(words) == 1 else shlex.join(words)
    with_stdin = not no_stdin and not sys.stdin.isatty()
    with Api() as api:
        sandbox = open_sandbox(api, sandbox_id)
    remote = RemoteCommand(sandbox, line, user, cwd, env, timeout_s, with_stdin)
    if background:
        click.echo(remote.leave_running())
    else:
        sys.exit(remote.run())
