"""`aenv images`: the short form of `aenv image list`."""

from __future__ import annotations

from agentenv.cli.commands.image import list_
from agentenv.cli.verb import Verb

command = Verb("images", params=list_.command.params, callback=list_.command.callback, help=list_.command.help)
command.section = list_.command.section
