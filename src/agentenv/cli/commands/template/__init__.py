"""`aenv template`: what sandboxes are started from."""

from agentenv.cli.verb import Group

_NO_BUILDS = (
    "this version of AgentENV does not build templates",
    "start from `base`, set the sandbox up, and keep it as a template: `aenv snapshot create ID --name NAME`",
)

command = Group(
    "template",
    __name__,
    section="Templates",
    aliases=("tpl",),
    absent=dict.fromkeys(("create", "ct", "build", "bd", "init", "it", "migrate"), _NO_BUILDS),
    help="What sandboxes are started from.",
)
