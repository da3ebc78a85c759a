"""`aenv logs`: the life of a sandbox on this node."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import click

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import clean, print_json_line
from agentenv.cli.verb import json_option, verb

POLL_S = 1.0
LIMIT = 1000
"""Entries asked for at once; the node gives no more."""


@verb("logs", section="Sandboxes")
@click.argument("sandbox_id", metavar="ID")
@click.option("--follow", "-f", is_flag=True, help="Go on until the sandbox is gone, or Ctrl-C.")
@json_option
def command(sandbox_id: str, follow: bool, as_json: bool) -> None:
    """Show what happened to a sandbox.

    Its starts, pauses and errors on this node, oldest first. With --json one entry per line.
    """
    from agentenv.cli.api import Api

    with Api() as api:
        full_id = api.full_id(sandbox_id)
        reader = LogReader()
        entries = reader.fresh(api.logs(full_id, 0, LIMIT))
        while True:
            for entry in entries:
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


def _show(entry: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json_line(entry)
        return
    fields = " ".join(f"{key}={value}" for key, value in (entry.get("fields") or {}).items() if key != "logger")
    click.echo(clean(f"{entry['timestamp']}  {entry['level']:<5}  {entry['message']}{'  ' + fields if fields else ''}").replace("\n", " "))
