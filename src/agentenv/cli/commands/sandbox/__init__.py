"""`aenv sandbox`: the verbs about sandboxes. The word may be left out: `aenv kill` is `aenv sandbox kill`."""

from agentenv.cli.verb import Group

command = Group(
    "sandbox",
    __name__,
    section="Sandboxes",
    aliases=("sbx",),
    help="All about sandboxes.\n\nThe word may be left out: `aenv kill` is `aenv sandbox kill`.",
)
