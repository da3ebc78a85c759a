"""The options that name a user of a registry; the password comes by standard input, which nobody else can see."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click


def account_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--username` and `--password-stdin`."""
    stdin = click.option("--password-stdin", is_flag=True, help="Read the password of that user from standard input.")
    username = click.option(
        "--username", "-u", metavar="NAME", help="User of the registry.  [default: what the node's `docker login` left]"
    )
    return username(stdin(command))


def read_account(username: str | None, password_stdin: bool) -> dict[str, str] | None:
    """What the API takes for that user; None when no user is named."""
    if (username is None) == password_stdin:
        raise click.UsageError("--username and --password-stdin go together")
    if username is None:
        return None
    return {"type": "registry", "username": username, "password": sys.stdin.read().removesuffix("\n")}
