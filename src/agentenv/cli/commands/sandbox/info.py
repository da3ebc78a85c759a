"""`aenv info`: all about one sandbox."""

from __future__ import annotations

from typing import Any

from agentenv.cli.output import print_fields, print_json
from agentenv.cli.verb import format_option, id_argument, verb


@verb("info", section="Sandboxes", aliases=("in",))
@id_argument
@format_option("-f")
def command(sandbox_id: str, as_json: bool) -> None:
    """Show all about one sandbox."""
    from agentenv.cli.api import Api, without_secrets

    with Api() as api:
        found = without_secrets(api.sandbox(api.full_id(sandbox_id)))
    if as_json:
        print_json(found)
    else:
        print_fields([(name, _text(value)) for name, value in found.items() if value is not None])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_text(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
