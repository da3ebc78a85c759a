"""`aenv env`: settings for E2B clients."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import click

from agentenv.cli.exits import CliError
from agentenv.cli.output import info, print_json, warn
from agentenv.cli.verb import json_option, verb

if TYPE_CHECKING:
    from agentenv.config.schema import Config


@verb("env", section="Node")
@click.option("--domain", "domain_mode", is_flag=True, help="For domain mode: E2B_DOMAIN and the local CA instead of E2B_API_URL.")
@json_option
def command(domain_mode: bool, as_json: bool) -> None:
    """Print the variables that point E2B clients here.

    Use it as `eval "$(aenv env)"`. The output holds the API key: do not log it. With --domain clients use TLS and the host names
    under the node's domain, which must resolve to it.
    """
    from agentenv.cli.node import config_in_force, read_record

    config = config_in_force()
    values = _domain_mode(config) if domain_mode else _single_host(config)
    if as_json:
        print_json({name: value for name, value in values.items() if value is not None})
    else:
        for name, value in values.items():
            click.echo(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
        if sys.stdout.isatty():
            info(f'to set them in this shell: eval "$(aenv env{" --domain" if domain_mode else ""})"')
    record = read_record(config)
    if record is None or not record.is_alive():
        warn("the server is not running; `aenv up --detach` starts it")


def _single_host(config: Config) -> dict[str, str | None]:
    from agentenv.cli.node import node_domain, node_url, read_key

    return {
        "E2B_API_URL": node_url(config),
        "E2B_SANDBOX_URL": node_url(config),
        "E2B_VOLUME_API_URL": node_url(config),
        "E2B_DOMAIN": node_domain(config),
        "E2B_API_KEY": read_key(config),
    }


def _domain_mode(config: Config) -> dict[str, str | None]:
    """The URLs would win over the domain (contract section 1.2), so they must not be set."""
    from agentenv.cli.node import node_paths, read_key

    if not config.api.domain:
        raise CliError("this node has no domain", "set api.domain, or start it with `aenv up --domain NAME[:PORT]`")
    values: dict[str, str | None] = {
        "E2B_API_URL": None,
        "E2B_SANDBOX_URL": None,
        "E2B_VOLUME_API_URL": None,
        "E2B_DOMAIN": config.api.client_domain,
        "E2B_API_KEY": read_key(config),
    }
    folder = node_paths(config).authority(config.api.domain_name)
    if config.api.tls_listen_port is not None and not config.api.tls_cert:
        values |= {"SSL_CERT_FILE": str(folder / "trust.pem"), "NODE_EXTRA_CA_CERTS": str(folder / "ca.pem")}
    return values
