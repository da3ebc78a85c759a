"""The terminal we run in: raw mode with a sure way back.

Invariant: whatever ends the `raw` block (an error, a signal that can be caught), the terminal has its old settings.
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import tty
from collections.abc import Iterator

from agentenv.cli.exits import CliError, Exit


def require_terminal(hint: str = "use `aenv exec ID -- COMMAND` in scripts") -> None:
    """CliError unless standard input and output are a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CliError("a shell needs a terminal on standard input and output", hint, Exit.USAGE)


def terminal_size() -> tuple[int, int]:
    """(rows, columns) of the terminal; 24 x 80 when it does not know (some report 0 x 0, which breaks programs)."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return 24, 80
    return size.lines or 24, size.columns or 80


@contextlib.contextmanager
def raw() -> Iterator[None]:
    """Keys go through one by one, unechoed and uninterpreted, while the block runs."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)  # the default would drop what was typed while the shell was opening
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
