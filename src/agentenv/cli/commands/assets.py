"""`aenv assets`: what guests are made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from agentenv.cli.output import ProgressReport, print_fields, print_json
from agentenv.cli.verb import json_option, verb


@verb("assets", section="Node")
@click.option("--verify", is_flag=True, help="Compare every file with its checksum; damaged ones are made again.")
@json_option
def command(verify: bool, as_json: bool) -> None:
    """Fetch what guests are made of, and show it.

    That is the guest kernel, its initramfs and the VMM; only what is missing is fetched.
    """
    from agentenv import wiring
    from agentenv.cli.node import config_in_force

    config = config_in_force()
    with ProgressReport() as progress:
        facts = asdict(wiring.ensure_assets(config, progress, verify=verify))
    if as_json:
        print_json(facts)
    else:
        print_fields(list(_flat(facts, "")))


def _flat(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(item) if isinstance(item, str | Path) else json.dumps(item, default=str)
