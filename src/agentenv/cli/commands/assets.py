"""`aenv assets`: what guests are made of."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
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
        found = wiring.ensure_assets(config, progress, verify=True) if verify else wiring.ensure_assets(config, progress)
    facts = asdict(found) if is_dataclass(found) and not isinstance(found, type) else dict(found)
    if as_json:
        print_json(facts)
    else:
        print_fields(list(_flat(facts, "")))


def _flat(value: dict[str, Any], prefix: str) -> Any:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item, default=str)
