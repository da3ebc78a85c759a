"""`aenv metrics`: what a sandbox uses."""

from __future__ import annotations

import time
from typing import Any

import click

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import clean, info, print_json_line, size, when
from agentenv.cli.verb import format_option, id_argument, verb

POLL_S = 2.0
"""While following; samples come every five seconds."""


@verb("metrics", section="Sandboxes", aliases=("mt",))
@id_argument
@click.option("--follow", "-f", is_flag=True, help="Go on until the sandbox has ended, or Ctrl-C.")
@format_option()
def command(sandbox_id: str, follow: bool, as_json: bool) -> None:
    """Show what a sandbox uses.

    Its CPU, memory and disk every five seconds of the last hour and every minute of the day before, oldest first. A server's restart
    begins them anew. With --json one sample per line.
    """
    from agentenv.cli.api import Api

    with Api() as api:
        full_id = api.full_id(sandbox_id)
        samples = api.metrics(full_id)
        if not samples and not follow:
            info("no samples yet; the first comes seconds after a start")
        last, last_s = "", None
        while True:
            for sample in samples:
                _show(sample, as_json)
                last, last_s = sample["timestamp"], sample["timestampUnix"]
            if not follow or (not samples and _has_ended(api, full_id)):
                return
            time.sleep(POLL_S)
            samples = [sample for sample in api.metrics(full_id, last_s) if sample["timestamp"] > last]


def _has_ended(api: Any, sandbox_id: str) -> bool:
    try:
        api.sandbox(sandbox_id)
    except CliError as error:
        if error.code == Exit.NOT_FOUND:
            return True
        raise
    return False


def _show(sample: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json_line(sample)
        return
    fields = (
        when(sample["timestamp"]),
        f"CPU {sample['cpuUsedPct']:5.1f}% of {sample['cpuCount']}",
        f"memory {size(sample['memUsed']):>9} of {size(sample['memTotal'])}",
        f"disk {size(sample['diskUsed']):>9} of {size(sample['diskTotal'])}",
    )
    click.echo(clean("  ".join(fields)))
