"""How `aenv` ends: exit codes, and the one exception the commands raise for a failure of their own.

Scripts decide by code, people read the message and its hint. `EXIT_CODES` is also the table in `docs/cli.md`.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the shell sees."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    TIMED_OUT = 124
    INTERRUPTED = 130


EXIT_CODES: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.FAILURE: "it failed; the message says why",
    Exit.USAGE: "the command line, the configuration or a value in them is wrong",
    Exit.NOT_FOUND: "no such sandbox, template or image",
    Exit.UNREACHABLE: "the node does not answer",
    Exit.TIMED_OUT: "`aenv exec --timeout` ran out and the command was killed (as `timeout` of coreutils does)",
    Exit.INTERRUPTED: "interrupted with Ctrl-C",
}


class CliError(Exception):
    """A failure with its exit code. `message` names the cause, `hint` the next step (may be empty)."""

    def __init__(self, message: str, hint: str = "", code: int = Exit.FAILURE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = int(code)
