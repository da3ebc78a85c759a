"""Making a sandbox: what `create` and `start` share. They differ in whether a terminal is opened in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from agentenv.cli.api import Api, without_secrets
from agentenv.cli.output import busy, info, print_json
from agentenv.cli.verb import json_option, pairs_option
from agentenv.core.quotas import NAMES

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Wish:
    """The sandbox that was asked for; its fields are the parameters of `creation_options`."""

    template: str
    timeout_s: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    on_timeout: str = "kill"
    auto_resume: bool = False
    limits: dict[str, str] = field(default_factory=dict)
    pause_when_idle: bool | None = None
    disk_mb: int | None = None

    def body(self) -> dict[str, Any]:
        """As the API takes it."""
        body: dict[str, Any] = {
            "templateID": self.template,
            "envVars": self.env,
            "metadata": self.metadata,
            "autoPause": self.on_timeout == "pause",
        }
        if self.auto_resume:
            body["autoResume"] = {"enabled": True}
        if self.pause_when_idle is not None:
            body["pauseWhenIdle"] = self.pause_when_idle
        if self.disk_mb is not None:
            body["diskSizeMB"] = self.disk_mb
        if self.limits:
            body["limits"] = {name: int(value) for name, value in self.limits.items()}
        if self.timeout_s is not None:
            body["timeout"] = self.timeout_s
        return body


def creation_options(function: Function) -> Function:
    """The argument and the options that say what sandbox is wanted."""
    for option in (
        json_option,
        click.option(
            "--auto-resume", "--lifecycle.autoresume", "auto_resume", is_flag=True, help="Requests to it wake it; with --on-timeout pause."
        ),
        click.option(
            "--on-timeout",
            "--lifecycle.ontimeout",
            "on_timeout",
            type=click.Choice(["kill", "pause"]),
            default="kill",
            show_default=True,
            help="What happens at its end.",
        ),
        click.option(
            "--pause-when-idle/--no-pause-when-idle",
            default=None,
            help="When idle and the host is short of memory, it may be paused.",
        ),
        click.option("--disk", "disk_mb", type=click.IntRange(1), metavar="MIB", help="Size of its disk.  [default: as the template has]"),
        pairs_option("--limit", f"Limit what it may use (repeatable): {', '.join(NAMES.values())}.", "limits"),
        pairs_option("--metadata", "Attach metadata (repeatable); `aenv ls --metadata` finds it.", "-m"),
        pairs_option("--env", "Set an environment variable in the sandbox (repeatable).", "-e"),
        click.option("--timeout", "timeout_s", type=click.IntRange(1), metavar="S", help="End it after S seconds.  [default: 300]"),
        click.argument("template", default="base"),
    ):
        function = option(function)
    return function


def check(wish: Wish) -> None:
    """UsageError when its parts do not go together."""
    for name, value in wish.limits.items():
        if name not in NAMES.values() or not value.isdigit():
            raise click.UsageError(f"--limit {name}={value}: not one of {', '.join(NAMES.values())} with a whole number")
    if wish.auto_resume and wish.on_timeout != "pause":
        raise click.UsageError("--auto-resume needs --on-timeout pause")


def create(api: Api, wish: Wish) -> dict[str, Any]:
    """Make it; the reply of the API."""
    try:
        with busy(f"starting a sandbox from {wish.template}"):
            return api.create(wish.body())
    except KeyboardInterrupt:
        info("the sandbox may start all the same; `aenv ls` shows it")
        raise


def show(made: dict[str, Any], as_json: bool) -> None:
    """Its id on stdout, or all the API says of it."""
    if as_json:
        print_json(without_secrets(made))
    else:
        click.echo(made["sandboxID"])
