"""`aenv template delete`: forget templates."""

from __future__ import annotations

from agentenv.cli.many import each
from agentenv.cli.template_choice import choice_options, chosen
from agentenv.cli.verb import verb


@verb("delete", section="Templates", aliases=("rm", "dl"))
@choice_options
def command(names: tuple[str, ...], select: bool, yes: bool) -> None:
    """Forget templates.

    The names of those that are gone are printed. One that sandboxes still run from, or are paused on, stays.
    """
    from agentenv.cli.api import Api

    with Api() as api:

        def delete(name: str) -> str:
            api.delete_template(name)
            return name

        each(chosen(api, names, select, yes, "Delete"), delete, "deleting")
