"""`aenv exec`: run a command in a sandbox."""

from __future__ import annotations

import shlex
import sys

import click

from agentenv.cli.verb import user_options, verb


@verb("exec", section="Inside a sandbox", context_settings={"ignore_unknown_options": False})
@click.argument("sandbox_id", metavar="ID")
@user_options
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=0, metavar="S", help="Kill it after S seconds.  [default: no limit]"
)
@click.option("--no-stdin", "-n", is_flag=True, help="Do not read standard input (as `ssh -n`; needed in `while read` loops).")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    sandbox_id: str, user: str | None, cwd: str | None, env: dict[str, str], timeout_s: float, no_stdin: bool, words: tuple[str, ...]
) -> None:
    """Run a command in a sandbox.

    Several words are taken as they are; a single one is a line for the shell, as in

    \b
        aenv exec ID -- 'ls *.py | wc -l'

    Standard output and error come apart and byte for byte, standard input is passed on when it is not a terminal, and
    the exit code is the command's (128 + N when signal N ended it). Ctrl-C kills it. It ends with the sandbox.
    """
    from agentenv.cli.api import Api
    from agentenv.cli.dataplane import open_sandbox
    from agentenv.cli.remote_command import RemoteCommand

    line = words[0] if len(words) == 1 else shlex.join(words)
    with_stdin = not no_stdin and not sys.stdin.isatty()
    with Api() as api:
        sandbox = open_sandbox(api, sandbox_id)
    sys.exit(RemoteCommand(sandbox, line, user, cwd, env, timeout_s, with_stdin).run())
