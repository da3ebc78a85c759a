"""`aenv template logs`: what a build said, and what it says from now on."""

from __future__ import annotations

import click

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.verb import json_option, verb


@verb("logs", section="Templates")
@click.argument("build", metavar="BUILD|NAME")
@json_option
def command(build: str, as_json: bool) -> None:
    """Show what a build said, and follow it until it ends.

    BUILD is its id, or the beginning of it; the name of a template means its last build. Exits with 1 when the build has failed.
    """
    from agentenv.cli.api import Api
    from agentenv.cli.build_follow import follow

    with Api() as api:
        jobs = api.builds()
        named = [job for job in jobs if build in (job["name"], job["templateID"], f"local/{job['name']}")]
        found = named[:1] or [job for job in jobs if build and job["buildID"].startswith(build)]
        if len(found) != 1:
            few = f"{len(found)} builds begin with {build!r}" if found else f"no build or template is called {build!r}"
            raise CliError(few, "`aenv template builds` lists them", Exit.USAGE if found else Exit.NOT_FOUND)
        follow(api, found[0]["templateID"], found[0]["buildID"], as_json)
