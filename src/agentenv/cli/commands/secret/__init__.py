"""`aenv secret`: named values that are stored encrypted and never shown."""

from agentenv.cli.verb import Group

command = Group("secret", __name__, section="Volumes and secrets", help="Named values that are stored encrypted and never shown.")
