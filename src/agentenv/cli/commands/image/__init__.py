"""`aenv image`: OCI images as the disks that templates are built on."""

from agentenv.cli.verb import Group

command = Group("image", __name__, section="Images", aliases=("img",), help="OCI images, which templates are built from.")
