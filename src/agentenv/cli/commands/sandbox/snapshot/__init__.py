"""`aenv snapshot`: keep a sandbox as it is now, as a template for others."""

from agentenv.cli.verb import Group

command = Group(
    "snapshot",
    __name__,
    section="Sandboxes",
    aliases=("snap",),
    help="Keep a sandbox as it is now, as a template for others.",
)
