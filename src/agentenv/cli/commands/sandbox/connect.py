"""`aenv connect`: a terminal in a sandbox."""

from __future__ import annotations

import sys

from agentenv.cli.verb import id_argument, user_options, verb


@verb("connect", section="Inside a sandbox", aliases=("shell", "cn"))
@id_argument
@user_options
def command(sandbox_id: str, user: str | None, cwd: str | None, env: dict[str, str]) -> None:
    """Open a shell in a sandbox.

    While it is open the sandbox does not time out. `exit` ends it; Enter, then ~ and . leave it even when the sandbox
    hangs. The exit code is the shell's. The sandbox goes on.
    """
    from agentenv.cli.api import Api
    from agentenv.cli.shell import run_shell

    with Api() as api:
        code = run_shell(api, sandbox_id, user, cwd, env)
    sys.exit(code)
