"""Which node a command talks to.

The E2B SDKs' own variables win where they are set (contract section 1.1), so `aenv` follows the same settings as the
programs beside it; what they leave open comes from this machine's node. This module is the only reader of E2B_*.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.node import config_in_force, node_domain, node_paths, node_url, read_key


@dataclass(frozen=True, slots=True)
class Target:
    """A node's address. `sandbox_url` None: sandboxes are reached by their own host names under `domain`."""

    api_url: str
    sandbox_url: str | None
    domain: str
    api_key: str = field(repr=False)
    key_source: str = ""


def find_target(environ: Mapping[str, str] | None = None) -> Target:
    """The node in force. CliError when no key is found, or a URL in the environment is none."""
    environ = os.environ if environ is None else environ
    api_url = environ.get("E2B_API_URL", "").rstrip("/")
    sandbox_url = environ.get("E2B_SANDBOX_URL", "").rstrip("/") or None
    domain = environ.get("E2B_DOMAIN", "")
    key = environ.get("E2B_API_KEY", "")
    key_source = "environment variable E2B_API_KEY"
    if not api_url and domain and not sandbox_url:
        api_url = f"https://api.{domain}"
    if not (api_url and key):
        config = config_in_force()
        if not api_url:
            api_url, sandbox_url = node_url(config), sandbox_url or node_url(config)
            domain = domain or node_domain(config)
        if not key:
            key, key_source = read_key(config), f"file {node_paths(config).api_key}"
    for name, url in (("E2B_API_URL", api_url), ("E2B_SANDBOX_URL", sandbox_url)):
        if url and not url.startswith(("http://", "https://")):
            raise CliError(f"{name} is {url!r}, which is no http:// or https:// URL", "mend or unset it", Exit.USAGE)
    return Target(api_url, sandbox_url, domain, key, key_source)
