"""`aenv version`: what is installed."""

from __future__ import annotations

import platform
from importlib.metadata import version

from agentenv import __version__
from agentenv.cli.output import print_fields, print_json
from agentenv.cli.verb import json_option, verb


@verb("version", section="Other")
@json_option
def command(as_json: bool) -> None:
    """Show versions.

    Of aenv, and of what it works with.
    """
    found = {"aenv": __version__, "e2b": version("e2b"), "python": platform.python_version(), "kernel": platform.release()}
    if as_json:
        print_json(found)
    else:
        print_fields(list(found.items()))
