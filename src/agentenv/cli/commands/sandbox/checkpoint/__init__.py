"""`aenv checkpoint`: instants that a sandbox can be rolled back to."""

from agentenv.cli.verb import Group

command = Group(
    "checkpoint",
    __name__,
    section="Sandboxes",
    aliases=("cp",),
    help="Instants that a sandbox can be rolled back to.",
)
