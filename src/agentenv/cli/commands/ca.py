"""`aenv ca`: the certificate authority that clients of this node must trust."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.output import info, print_fields, print_json
from agentenv.cli.verb import json_option, verb

if TYPE_CHECKING:
    from agentenv.config.schema import Config
    from agentenv.proxy.authority import LocalAuthority

_STORE = Path("/usr/local/share/ca-certificates")
_UPDATE = "update-ca-certificates"
_UPDATE_DEADLINE_S = 120.0


@verb("ca", section="Node")
@click.option("--pem", is_flag=True, help="Print the certificate itself.")
@click.option("--path", "show_path", is_flag=True, help="Print the path of the certificate alone.")
@click.option("--install", is_flag=True, help="Add it to this machine's trust store (Debian and its kin).")
@click.option("--uninstall", is_flag=True, help="Take it out of the trust store again.")
@json_option
def command(pem: bool, show_path: bool, install: bool, uninstall: bool, as_json: bool) -> None:
    """Show the local certificate authority, or install it.

    With a domain (setting api.domain) the node serves TLS under it, with a certificate of an authority of its own that can sign
    for that domain only. Clients must trust it once: point SSL_CERT_FILE (Python) and NODE_EXTRA_CA_CERTS (Node.js) at the
    files shown here, or run `aenv ca --install`. Renewing certificates needs no restart and changes no trust.
    """
    from agentenv.cli.node import config_in_force

    if pem + show_path + install + uninstall + as_json > 1:
        raise CliError("choose one of --pem, --path, --install, --uninstall and --json", "`aenv ca --help`", Exit.USAGE)
    config = config_in_force()
    authority = _authority(config)
    if pem:
        click.echo(authority.ca_file.read_text(), nl=False)
    elif show_path:
        click.echo(authority.ca_file)
    elif install or uninstall:
        _change_store(config, authority, install)
    else:
        _show(config, authority, as_json)


def _authority(config: Config) -> LocalAuthority:
    """The authority, made if this is the first time that anyone asks for it."""
    from agentenv.cli.node import node_paths
    from agentenv.core.clock import SystemClock
    from agentenv.proxy.authority import LocalAuthority

    if not config.api.domain:
        raise CliError("this node has no domain, so it serves no TLS", "set api.domain, or start it with `aenv up --domain NAME[:PORT]`")
    if config.api.tls_listen_port is None:
        raise CliError("TLS is off on this node", f"api.domain is {config.api.domain}; see the setting api.tls_port")
    if config.api.tls_cert:
        raise CliError(
            f"this node shows the certificate {config.api.tls_cert}, not one of its own authority", "see the setting api.tls_cert"
        )
    name = config.api.domain_name
    authority = LocalAuthority(node_paths(config).authority(name), name, SystemClock())
    try:
        authority.ensure()
    except OSError as error:
        raise CliError(f"cannot read or write {authority.ca_file.parent}: {error.strerror}", "run aenv as root") from error
    return authority


def _show(config: Config, authority: LocalAuthority, as_json: bool) -> None:
    from cryptography.hazmat.primitives.hashes import SHA256

    certificate = authority.certificate()
    values = {
        "domain": config.api.client_domain,
        "path": str(authority.ca_file),
        "trust_path": str(authority.trust_file),
        "sha256": certificate.fingerprint(SHA256()).hex(":").upper(),
        "valid_until": certificate.not_valid_after_utc.date().isoformat(),
    }
    if as_json:
        print_json(values)
        return
    print_fields(list(values.items()))
    info("")
    info("Python clients (the variable replaces all roots, so this file holds the machine's own as well):")
    info(f"  export SSL_CERT_FILE={authority.trust_file}")
    info("Node.js clients:")
    info(f"  export NODE_EXTRA_CA_CERTS={authority.ca_file}")
    info('All variables of domain mode: eval "$(aenv env --domain)"; curl and other programs here: aenv ca --install')


def _change_store(config: Config, authority: LocalAuthority, install: bool) -> None:
    if shutil.which(_UPDATE) is None:
        raise CliError(
            f"{_UPDATE} is not on this machine",
            f"install the package ca-certificates, or hand {authority.ca_file} to your system's own tool",
        )
    file = _STORE / f"agentenv-{config.api.domain_name}.crt"
    try:
        if install:
            _STORE.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(authority.ca_file, file)
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}", "run aenv as root") from error
    done = subprocess.run([_UPDATE], capture_output=True, text=True, timeout=_UPDATE_DEADLINE_S, check=False)
    if done.returncode != 0:
        raise CliError(f"{_UPDATE} failed: {done.stderr.strip()[-300:]}", f"the certificate is {file}")
    info(f"{'added' if install else 'removed'} {file}")
    if install:
        info("Python's own HTTP clients bring their roots along: they still need SSL_CERT_FILE (see `aenv ca`)")
