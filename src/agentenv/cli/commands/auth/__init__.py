"""`aenv auth`: whose key is used. There is nothing to log in to."""

from agentenv.cli.verb import Group

_NO_LOGIN = (
    "a node has no accounts, so there is nothing to log in to or to choose",
    "its key is in its home and the commands read it there; `aenv env` hands it to E2B clients, `aenv auth info` shows whether it works",
)

command = Group(
    "auth",
    __name__,
    section="Node",
    absent=dict.fromkeys(("login", "logout", "configure"), _NO_LOGIN),
    help="Whose key is used. There is nothing to log in to.",
)
