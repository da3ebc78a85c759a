"""A template's own PATH, kept in login shells: `/etc/profile` of most distributions sets PATH anew, and the SDKs run commands in them.

The template gets a file among those that `/etc/profile` reads last. What is built from the template inherits file and PATH alike.
"""

from __future__ import annotations

import contextlib
import shlex

from agentenv.core.errors import Internal
from agentenv.core.model import Context
from agentenv.guest.commands import Command, CommandRefused
from agentenv.template.workshop import Bench

FILE = "/etc/profile.d/00-template-path.sh"
"""The first of its folder: what the image itself adds to PATH there comes after it."""
_DEADLINE_S = 60.0
_WRITE = f'[ ! -d /etc/profile.d ] || printf %s "$1" > {FILE}'


async def keep_path(bench: Bench, context: Context) -> None:
    """Let login shells of the machine on `bench` have the PATH of `context`, if it has one. Nothing where there is no shell. Internal."""
    path = context.env_vars.get("PATH")
    if path is None:
        return
    text = f"# The template's own, which /etc/profile has replaced.\nexport PATH={shlex.quote(path)}\n"
    said = bytearray()
    with contextlib.suppress(CommandRefused):
        command = Command(("/bin/sh", "-c", _WRITE, "sh", text), workdir="/")
        ended = await bench.run(command, lambda _, data: said.extend(data), _DEADLINE_S)
        if ended.exit_code != 0:
            raise Internal(f"PATH could not be kept in {FILE}: {said[-300:].decode(errors='replace')}", "see that the disk has room")
