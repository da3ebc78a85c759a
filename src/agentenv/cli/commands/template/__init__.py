"""`aenv template`: what sandboxes are started from."""

from agentenv.cli.verb import Group

_NO_FILES_OF_E2B = (
    "AgentENV has no project files to make or migrate",
    "write a Dockerfile, or a program with the SDK's Template; `aenv template build FOLDER` builds a Dockerfile",
)

command = Group(
    "template",
    __name__,
    section="Templates",
    aliases=("tpl",),
    absent=dict.fromkeys(("create", "ct", "init", "it", "migrate"), _NO_FILES_OF_E2B),
    help="What sandboxes are started from.",
)
