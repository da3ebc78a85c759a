"""`aenv templates`: the short form of `aenv template list`."""

from __future__ import annotations

from agentenv.cli.commands.template import list_
from agentenv.cli.verb import Verb

command = Verb("templates", params=list_.command.params, callback=list_.command.callback, help=list_.command.help)
command.section = list_.command.section
