"""Taking a secret's value in, so that it is in no argument list and no shell history."""

from __future__ import annotations

import sys

import click

from agentenv.cli.exits import CliError, Exit


def read_value(name: str) -> str:
    """The value of secret `name`: asked for on a terminal without showing it, else standard input without its last line end."""
    if sys.stdin.isatty():
        return str(click.prompt(f"value of {name}", hide_input=True, err=True))
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise CliError("the value on standard input is no UTF-8 text", "encode it, for example with base64", Exit.USAGE) from error
    return text.removesuffix("\n").removesuffix("\r")
