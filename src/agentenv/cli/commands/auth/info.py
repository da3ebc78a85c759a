"""`aenv auth info`: which node the commands talk to, with which key, and whether it takes it."""

from __future__ import annotations

from agentenv.cli.output import info, print_fields, print_json
from agentenv.cli.verb import json_option, verb


@verb("info", section="Node")
@json_option
def command(as_json: bool) -> None:
    """Show which node is used, with which key.

    The key itself is not shown; `aenv env` prints it. Exit code 0 when the node takes it.
    """
    from agentenv.cli.api import Api

    with Api() as api:
        target = api.target
        facts = {"api": target.api_url, "sandboxes": target.sandbox_url or f"https://PORT-ID.{target.domain}", "domain": target.domain}
        facts["key"] = f"from {target.key_source}"
        if not as_json:
            print_fields(list(facts.items()))
        api.check_key()
    if as_json:
        print_json(facts)
    else:
        info("the node takes this key")
