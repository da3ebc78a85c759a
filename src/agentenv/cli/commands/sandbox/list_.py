"""`aenv ls`: list sandboxes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from agentenv.cli.output import duration, info, limited, print_json, print_table
from agentenv.cli.verb import LIST_LIMIT, format_option, metadata_filter_option, states_option, verb


@verb("list", section="Sandboxes", aliases=("ls",))
@click.option("--all", "-a", "show_all", is_flag=True, help="Running and paused ones.")
@states_option("Those in these states, e.g. running,paused.  [default: running]")
@metadata_filter_option("Only those with this metadata (repeatable; all must match).")
@click.option("--template", "-t", metavar="NAME", help="Only those started from this template (name or id).")
@click.option("--started-after", metavar="TIME", help="Only those started at or after this time, e.g. 2026-01-31T12:00:00Z.")
@click.option("--order", "-o", type=click.Choice(["asc", "desc"]), default="desc", show_default=True, help="By time of start.")
@click.option("--limit", "-l", type=click.IntRange(0), default=LIST_LIMIT, show_default=True, metavar="N", help="At most N; 0 means all.")
@format_option("-f")
def command(show_all: bool, states: str | None, limit: int, as_json: bool, **filters: Any) -> None:
    """List sandboxes, newest first."""
    from agentenv.cli.api import Api, without_secrets

    if show_all and states:
        raise click.UsageError("--all and --state exclude each other")
    wanted = states or ("running,paused" if show_all else "running")
    with Api() as api:
        shown = [without_secrets(item) for item in limited(api.sandboxes(wanted, **filters), limit)]
        hidden = 0 if states or show_all or as_json else sum(1 for _ in api.sandboxes("paused", **filters))
    if as_json:
        print_json(shown)
    elif shown:
        now = datetime.now(UTC)
        header = ("ID", "TEMPLATE", "STATE", "AGE", "ENDS IN", "CPU", "MEMORY", "METADATA")
        print_table(header, [_row(item, now) for item in shown])
    if hidden:
        info(f"{hidden} paused {'sandbox is' if hidden == 1 else 'sandboxes are'} not shown; `aenv ls --all` shows all")
    elif not shown and not as_json:
        info("no sandboxes match" if states or any(filters[name] for name in ("metadata", "template", "started_after")) else _NONE)


_NONE = "no sandboxes; `aenv start` makes one"


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
