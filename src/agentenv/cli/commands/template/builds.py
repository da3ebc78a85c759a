"""`aenv template builds`: the builds of late, and how far they are."""

from __future__ import annotations

from agentenv.cli.output import info, print_json, print_table, when
from agentenv.cli.verb import format_option, verb


@verb("builds", section="Templates")
@format_option("-f")
def command(as_json: bool) -> None:
    """List the builds requested last, the newest first."""
    from agentenv.cli.api import Api

    with Api() as api:
        found = api.builds()
    if as_json:
        print_json(found)
    elif found:
        rows = [(job["buildID"], job["name"], ", ".join(job["tags"]), job["status"], when(job["createdAt"])) for job in found]
        print_table(("BUILD", "TEMPLATE", "TAGS", "STATUS", "REQUESTED"), rows)
    else:
        info("no builds; `aenv template build` makes one")
