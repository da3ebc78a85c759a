"""`aenv logs`: the life of a sandbox on this node."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from typing import Any

import click

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import clean, print_json_line, styled
from agentenv.cli.verb import format_option, id_argument, verb

POLL_S = 1.0
LIMIT = 1000
"""Entries asked for at once; the node gives no more."""
LEVELS = ("debug", "info", "warn", "error")
_COLOURS = {"warn": "yellow", "error": "red"}


@verb("logs", section="Sandboxes", aliases=("lg",))
@id_argument
@click.option("--follow", "-f", is_flag=True, help="Go on until the sandbox is gone, or Ctrl-C.")
@click.option(
    "--level", type=click.Choice(LEVELS, case_sensitive=False), default="info", show_default=True, help="Entries of this weight or more."
)
@click.option("--loggers", metavar="NAMES", help="Only entries of these, e.g. orchestrator,guest.  [default: all]")
@format_option()
def command(sandbox_id: str, follow: bool, level: str, loggers: str | None, as_json: bool) -> None:
    """Show what happened to a sandbox.

    Its starts, pauses and errors on this node, oldest first. With --json one entry per line.
    """
    from agentenv.cli.api import Api

    shown_levels = LEVELS[LEVELS.index(level.lower()) :]
    shown_loggers = {name.strip() for name in loggers.split(",")} if loggers else None
    with Api() as api:
        full_id = api.full_id(sandbox_id)
        reader = LogReader()
        entries = reader.fresh(api.logs(full_id, 0, LIMIT))
        while True:
            for entry in entries:
                if entry["level"] in shown_levels and (shown_loggers is None or _logger(entry) in shown_loggers):
                    _show(entry, as_json)
            if len(entries) == LIMIT:  # there may be more already
                wait_s = 0.0
            elif follow:
                wait_s = POLL_S
            else:
                return
            time.sleep(wait_s)
            try:
                entries = reader.fresh(api.logs(full_id, reader.start_ms, LIMIT))
            except CliError as error:
                if error.code == Exit.NOT_FOUND:  # followed to its end
                    return
                raise


class LogReader:
    """Remembers how far the log was read: entries of the last millisecond come again and are left out."""

    def __init__(self) -> None:
        self.start_ms = 0
        self._seen: list[dict[str, Any]] = []

    def fresh(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The entries not seen before."""
        new = [entry for entry in entries if entry not in self._seen]
        if new:
            last_ms = _epoch_ms(new[-1])
            kept = self._seen if last_ms == self.start_ms else []
            self._seen = [*kept, *(entry for entry in new if _epoch_ms(entry) == last_ms)]
            self.start_ms = last_ms
        return new


def _epoch_ms(entry: dict[str, Any]) -> int:
    return round(datetime.fromisoformat(entry["timestamp"]).timestamp() * 1000)


def _logger(entry: dict[str, Any]) -> str:
    return str((entry.get("fields") or {}).get("logger", ""))


def _show(entry: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json_line(entry)
        return
    level = styled(f"{entry['level']:<5}", sys.stdout, fg=_COLOURS.get(entry["level"]))
    fields = " ".join(f"{key}={value}" for key, value in (entry.get("fields") or {}).items() if key != "logger")
    text = clean(f"{entry['message']}{'  ' + fields if fields else ''}").replace("\n", " ")
    click.echo(f"{clean(entry['timestamp'])}  {level}  {text}")
