"""`aenv volume`: directory trees that sandboxes mount and that outlive them."""

from agentenv.cli.verb import Group

command = Group(
    "volume", __name__, section="Volumes and secrets", aliases=("vol",), help="Directory trees that sandboxes mount and that outlive them."
)
