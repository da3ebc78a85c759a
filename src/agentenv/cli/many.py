"""Doing one thing to several sandboxes: every one gets its turn, and the first failure decides the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import click

from agentenv.cli.exits import CliError
from agentenv.cli.output import busy, fail


def each(given_ids: Iterable[str], act: Callable[[str], str], doing: str) -> None:
    """Call `act` for each id and print what it returns (the full id). Exits with the code of the first failure.

    `doing` is what people see while one takes long, as in "pausing".
    """
    code = 0
    for given in given_ids:
        try:
            with busy(f"{doing} {given}"):
                full_id = act(given)
            click.echo(full_id)
        except CliError as error:
            fail(f"{given}: {error.message}", error.hint)
            code = code or error.code
    if code:
        sys.exit(code)
