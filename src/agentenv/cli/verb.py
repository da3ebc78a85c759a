"""What `aenv` is made of: verbs, the groups they stand in, and options that several of them share.

A group is a folder of `cli.commands`; each module of it holds `command`, a `Verb`, and each folder in it a further
`Group`. There is no list to keep, and modules are read when needed. A module `verb` or `verb_` is the verb `verb`.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

import click

from agentenv.cli.exits import CliError, Exit

LIST_LIMIT = 1000
"""How many items a list shows unless told otherwise, as in the E2B command line."""
SECTIONS = ("Node", "Sandboxes", "Inside a sandbox", "Templates", "Images", "Volumes and secrets", "Other")
Function = TypeVar("Function", bound=Callable[..., Any])


class Verb(click.Command):
    """A command that knows under which heading of the help it stands, and by which other names it goes."""

    section = "Other"
    aliases: tuple[str, ...] = ()


class Group(click.Group):
    """The verbs of the folder `package`. `absent` names verbs there are none of, and says why."""

    def __init__(
        self,
        name: str,
        package: str,
        *,
        section: str = "Other",
        aliases: tuple[str, ...] = (),
        absent: Mapping[str, tuple[str, str]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(name, **settings)
        self.package = package
        self.section = section
        self.aliases = aliases
        self.absent = absent or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name but the aliases, sorted."""
        return sorted(self._modules())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name or alias, or None."""
        modules = self._modules()
        if cmd_name in modules:
            return self._load(modules[cmd_name])
        for module in modules.values():
            command = self._load(module)
            if cmd_name in aliases_of(command):
                return command
        return None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but a mistyped command says where the list is."""
        if args and args[0] in self.absent:
            raise CliError(f"`{ctx.command_path} {args[0]}`: {self.absent[args[0]][0]}", self.absent[args[0]][1])
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            alike = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1) if args else []
            meant = f"did you mean `{ctx.command_path} {alike[0]}`? " if alike else ""
            raise CliError(error.format_message(), f"{meant}`{ctx.command_path} --help` lists the commands", Exit.USAGE) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by section, in the order of `SECTIONS`; under one plain heading when all are of one."""
        commands = [command for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))]
        sections = [section for section in SECTIONS if any(section_of(command) == section for command in commands)]
        for section in sections:
            rows = [
                (", ".join((command.name or "", *aliases_of(command))), command.get_short_help_str(70))
                for command in commands
                if section_of(command) == section
            ]
            with formatter.section(section if len(sections) > 1 else "Commands"):
                formatter.write_dl(rows)

    def _modules(self) -> dict[str, str]:
        folder = import_module(self.package).__path__
        return {module.name.rstrip("_"): module.name for module in pkgutil.iter_modules(folder)}

    def _load(self, module: str) -> click.Command:
        command: click.Command = import_module(f"{self.package}.{module}").command
        return command


def aliases_of(command: click.Command) -> tuple[str, ...]:
    """The other names of a command."""
    return getattr(command, "aliases", ())


def section_of(command: click.Command) -> str:
    """The heading a command stands under."""
    return getattr(command, "section", SECTIONS[-1])


def walk(group: click.Group, ctx: click.Context, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every verb below `group` with the words that name it, sorted; groups themselves are left out."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if isinstance(command, click.Group):
            yield from walk(command, ctx, (*path, name))
        elif command is not None:
            yield (*path, name), command


def verb(
    name: str, section: str, aliases: tuple[str, ...] = (), cls: type[Verb] = Verb, **settings: Any
) -> Callable[[Callable[..., Any]], Verb]:
    """Make a function a command of `section`; its docstring is the help text."""
    if section not in SECTIONS:
        raise ValueError(f"no section {section!r}")

    def decorate(function: Callable[..., Any]) -> Verb:
        made = click.command(name, cls=cls, **settings)(function)
        made.section = section
        made.aliases = aliases
        return made

    return decorate


def _note_json(ctx: click.Context, _parameter: click.Parameter, value: bool | str | None) -> None:
    """`--json` and `--format json` are one wish."""
    ctx.params["as_json"] = ctx.params.get("as_json", False) or value is True or value == "json"


json_option = click.option("--json", is_flag=True, expose_value=False, callback=_note_json, help="Print JSON instead of text.")


def format_option(*flags: str) -> Callable[[Function], Function]:
    """`--json`, and the E2B command line's word for it with the short `flags`."""
    choice = click.Choice(["pretty", "json"], case_sensitive=False)

    def decorate(function: Function) -> Function:
        function = click.option(
            *flags,
            "--format",
            type=choice,
            expose_value=False,
            callback=_note_json,
            help="json is the same as --json.",
        )(function)
        return json_option(function)

    return decorate


def pairs_option(flag: str, help_text: str, *short: str) -> Callable[[Function], Function]:
    """An option that may be repeated and collects `KEY=VALUE` into a dict."""
    return click.option(flag, *short, multiple=True, metavar="KEY=VALUE", callback=_pairs, help=help_text)


def metadata_filter_option(help_text: str) -> Callable[[Function], Function]:
    """`--metadata a=1,b=2`, repeatable. A part without `=` belongs to the value before it."""
    return click.option("--metadata", "-m", multiple=True, metavar="KEY=VALUE", callback=_joined_pairs, help=help_text)


def states_option(help_text: str) -> Callable[[Function], Function]:
    """`--state running,paused`; None when it is not given."""
    return click.option("--state", "-s", "states", metavar="STATES", callback=_states, help=help_text)


def id_argument(function: Function) -> Function:
    """The one sandbox a verb is about."""
    return click.argument("sandbox_id", metavar="ID", shell_complete=_complete_ids)(function)


def ids_argument(required: bool = True) -> Callable[[Function], Function]:
    """The sandboxes a verb is about."""
    return click.argument("ids", nargs=-1, required=required, metavar="ID...", shell_complete=_complete_ids)


def user_options(function: Function) -> Function:
    """--user, --cwd and --env, as `exec` and `connect` take them."""
    for option in (
        pairs_option("--env", "Set an environment variable (repeatable).", "-e"),
        click.option("--cwd", "-c", metavar="DIR", help="Working directory.  [default: the template's]"),
        click.option("--user", "-u", metavar="NAME", help="User to run as.  [default: the template's]"),
    ):
        function = option(function)
    return function


durable_option = click.option("--durable", is_flag=True, help="Wait until it would survive a crash of the machine.")


def _pairs(_ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE", param=parameter)
        found[key] = rest
    return found


def _joined_pairs(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs: list[str] = []
    for value in values:
        first, *others = value.split(",")
        pairs.append(first)
        for part in others:
            if "=" in part:
                pairs.append(part)
            else:
                pairs[-1] += f",{part}"
    return _pairs(ctx, parameter, tuple(pairs))


def _states(_ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    names = list(dict.fromkeys(name.strip().lower() for name in value.split(",") if name.strip()))
    if not names or set(names) - {"running", "paused"}:
        raise click.BadParameter(f"{value!r} is not `running`, `paused` or both joined by a comma", param=parameter)
    return ",".join(names)


def _complete_ids(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from agentenv.cli.api import Api

    try:
        with Api() as api:
            return [item["sandboxID"] for item in api.sandboxes() if item["sandboxID"].startswith(incomplete)]
    except Exception:  # noqa: BLE001 - the user only pressed a key; the command itself will tell what is wrong
        return []
