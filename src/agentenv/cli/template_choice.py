"""Which templates a verb is about: those that are named, or those that are picked from a list; and a last question."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from agentenv.cli.api import Api
from agentenv.cli.exits import CliError, Exit
from agentenv.cli.many import each
from agentenv.cli.output import clean, info

Function = TypeVar("Function", bound=Callable[..., Any])


def choice_options(function: Function) -> Function:
    """TEMPLATE..., --select and --yes."""
    for option in (
        click.option("--project", "--team", "-t", "project", hidden=True, expose_value=False),  # a node is one project
        click.option("--yes", "-y", is_flag=True, help="Do not ask."),
        click.option("--select", "-s", is_flag=True, help="Pick them from a list."),
        click.argument("names", nargs=-1, metavar="TEMPLATE..."),
    ):
        function = option(function)
    return function


def chosen(api: Api, names: tuple[str, ...], select: bool, yes: bool, question: str) -> tuple[str, ...]:
    """The names or ids that were meant, after the user has agreed. CliError when nobody can be asked."""
    if select == bool(names):
        raise click.UsageError("name templates, or pick them with --select")
    if (select or not yes) and not sys.stdin.isatty():
        raise CliError("nobody is there to ask: standard input is not a terminal", "name the templates and add --yes", Exit.USAGE)
    if select:
        names = _pick([_name(item) for item in api.templates()])
    if names and not yes and not click.confirm(clean(f"{question} {', '.join(names)}?"), err=True):
        raise CliError("nothing was changed")
    return names


def publish(names: tuple[str, ...], select: bool, yes: bool, *, public: bool) -> None:
    """Mark templates, one after the other."""
    with Api() as api:

        def mark(name: str) -> str:
            api.publish_template(name, public)
            return name

        each(chosen(api, names, select, yes, "Publish" if public else "Unpublish"), mark, "marking")


def _pick(names: list[str]) -> tuple[str, ...]:
    if not names:
        info("no templates")
        return ()
    for number, name in enumerate(names, 1):
        click.echo(f"{number:3}  {clean(name)}", err=True)
    answer = click.prompt("Numbers, with spaces between", err=True)
    try:
        picked = [int(word) for word in answer.replace(",", " ").split()]
    except ValueError:
        picked = [0]
    if not picked or any(not 1 <= number <= len(names) for number in picked):
        raise CliError(f"{answer!r} are not numbers of the list", "", Exit.USAGE)
    return tuple(names[number - 1] for number in dict.fromkeys(picked))


def _name(item: dict[str, Any]) -> str:
    return str((item.get("names") or item.get("aliases") or [item["templateID"]])[0])
