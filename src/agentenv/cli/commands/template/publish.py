"""`aenv template publish`: mark templates as public."""

from __future__ import annotations

from agentenv.cli.template_choice import choice_options, publish
from agentenv.cli.verb import verb


@verb("publish", section="Templates", aliases=("pb",))
@choice_options
def command(names: tuple[str, ...], select: bool, yes: bool) -> None:
    """Mark templates as public.

    A node has one team, so this changes only what lists show of them.
    """
    publish(names, select, yes, public=True)
