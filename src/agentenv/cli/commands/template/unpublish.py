"""`aenv template unpublish`: mark templates as private."""

from __future__ import annotations

from agentenv.cli.template_choice import choice_options, publish
from agentenv.cli.verb import verb


@verb("unpublish", section="Templates", aliases=("upb",))
@choice_options
def command(names: tuple[str, ...], select: bool, yes: bool) -> None:
    """Mark templates as private again."""
    publish(names, select, yes, public=False)
