"""The class of every `aenv` command, and options that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

SECTIONS = ("Node", "Sandboxes", "Inside a sandbox", "Other")
Function = TypeVar("Function", bound=Callable[..., Any])


class Verb(click.Command):
    """A command that knows under which heading of `aenv --help` it stands."""

    section = "Other"


def verb(name: str, section: str, **settings: Any) -> Callable[[Callable[..., Any]], Verb]:
    """Make a function a command of `section`; its docstring is the help text."""
    if section not in SECTIONS:
        raise ValueError(f"no section {section!r}")

    def decorate(function: Callable[..., Any]) -> Verb:
        made = click.command(name, cls=Verb, **settings)(function)
        made.section = section
        return made

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def pairs_option(flag: str, help_text: str) -> Callable[[Function], Function]:
    """An option that may be repeated and collects `KEY=VALUE` into a dict."""
    return click.option(flag, multiple=True, metavar="KEY=VALUE", callback=_pairs, help=help_text)


def user_options(function: Function) -> Function:
    """--user, --cwd and --env, as `exec` and `shell` take them."""
    for option in (
        pairs_option("--env", "Set an environment variable (repeatable)."),
        click.option("--cwd", metavar="DIR", help="Working directory.  [default: the template's]"),
        click.option("--user", metavar="NAME", help="User to run as.  [default: the template's]"),
    ):
        function = option(function)
    return function


def _pairs(_ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE", param=parameter)
        found[key] = rest
    return found
