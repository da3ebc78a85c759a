"""`aenv env`: settings for E2B clients."""

from __future__ import annotations

import shlex
import sys

import click

from agentenv.cli.output import info, print_json, warn
from agentenv.cli.verb import json_option, verb


@verb("env", section="Node")
@json_option
def command(as_json: bool) -> None:
    """Print the variables that point E2B clients here.

    Use it as `eval "$(aenv env)"`. The output holds the API key: do not log it.
    """
    from agentenv.cli.node import config_in_force, node_domain, node_url, read_key, read_record

    config = config_in_force()
    values = {
        "E2B_API_URL": node_url(config),
        "E2B_SANDBOX_URL": node_url(config),
        "E2B_DOMAIN": node_domain(config),
        "E2B_API_KEY": read_key(config),
    }
    if as_json:
        print_json(values)
    else:
        for name, value in values.items():
            click.echo(f"export {name}={shlex.quote(value)}")
        if sys.stdout.isatty():
            info('to set them in this shell: eval "$(aenv env)"')
    record = read_record(config)
    if record is None or not record.is_alive():
        warn("the server is not running; `aenv up --detach` starts it")
