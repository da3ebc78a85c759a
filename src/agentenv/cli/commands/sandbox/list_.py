"""`aenv ls`: list sandboxes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from agentenv.cli.output import duration, info, print_json, print_table
from agentenv.cli.verb import json_option, pairs_option, verb


@verb("ls", section="Sandboxes")
@click.option("--all", "show_all", is_flag=True, help="Running and paused ones.")
@click.option("--state", type=click.Choice(["running", "paused"]), help="Only these.  [default: running]")
@pairs_option("--metadata", "Only those with this metadata (repeatable; all must match).")
@json_option
def command(show_all: bool, state: str | None, metadata: dict[str, str], as_json: bool) -> None:
    """List sandboxes, newest first."""
    from agentenv.cli.api import Api, without_secrets

    if show_all and state:
        raise click.UsageError("--all and --state exclude each other")
    with Api() as api:
        items = [without_secrets(item) for item in api.sandboxes(state or "running,paused", metadata)]
    shown = items if show_all or state else [item for item in items if item["state"] == "running"]
    if as_json:
        print_json(shown)
        return
    if shown:
        now = datetime.now(UTC)
        header = ("ID", "TEMPLATE", "STATE", "AGE", "ENDS IN", "CPU", "MEMORY", "METADATA")
        print_table(header, [_row(item, now) for item in shown])
    hidden = len(items) - len(shown)
    if hidden:
        info(f"{hidden} paused {'sandbox is' if hidden == 1 else 'sandboxes are'} not shown; `aenv ls --all` shows all")
    elif not shown:
        info("no sandboxes; `aenv start` makes one")


def _row(item: dict[str, Any], now: datetime) -> tuple[str, ...]:
    left = datetime.fromisoformat(item["endAt"]) - now
    age = now - datetime.fromisoformat(item["startedAt"])
    return (
        item["sandboxID"],
        item.get("alias") or item["templateID"],
        item["state"],
        duration(age.total_seconds()),
        duration(left.total_seconds()) if item["state"] == "running" else "-",
        str(item["cpuCount"]),
        f"{item['memoryMB']} MiB",
        " ".join(f"{key}={value}" for key, value in sorted((item.get("metadata") or {}).items())),
    )
