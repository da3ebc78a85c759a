"""`aenv template build`: make a template from a Dockerfile, an image or another template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentenv.cli.build_source import DockerfileSource, ImageSource, Upload, find_source
from agentenv.cli.output import ProgressReport, info, print_json_line, warn
from agentenv.cli.verb import json_option, pairs_option, verb

if TYPE_CHECKING:
    from agentenv.cli.api import Api


@verb("build", section="Templates", aliases=("bd",))
@click.argument("source", metavar="FOLDER|DOCKERFILE|IMAGE")
@click.option("--name", "-n", metavar="NAME[:TAG]", help="What the template is called.  [default: like the folder or image]")
@click.option("--tag", "-t", "tags", multiple=True, help="A tag of it; may be repeated.  [default: default]")
@click.option("--file", "-f", "dockerfile", type=click.Path(path_type=Path), help="The Dockerfile.  [default: FOLDER/Dockerfile]")
@pairs_option("--build-arg", "A value for an ARG of the Dockerfile; may be repeated.")
@click.option("--target", metavar="STAGE", default="", help="The stage that becomes the template.  [default: the last]")
@click.option("--start-cmd", default="", help="Start this in place of ENTRYPOINT and CMD; it runs in every sandbox of the template.")
@click.option("--ready-cmd", default="", help="The template is captured once this succeeds.  [default: that of HEALTHCHECK]")
@click.option("--no-start", is_flag=True, help="Start neither ENTRYPOINT nor CMD.")
@click.option("--cpu", type=click.IntRange(1, 32), help="Virtual CPUs.  [default: as the base has]")
@click.option("--memory", type=click.IntRange(128, 65536), metavar="MIB", help="Memory in MiB.  [default: as the base has]")
@click.option("--no-cache", is_flag=True, help="Run every step, whatever is cached.")
@click.option("--detach", "-d", is_flag=True, help="Print the build's id and leave; it goes on.")
@json_option
def command(source: str, name: str | None, dockerfile: Path | None, build_arg: dict[str, str], as_json: bool, **given: Any) -> None:
    """Make a template from a Dockerfile or an image.

    The name of the template is printed. FOLDER is what COPY copies from, and has the Dockerfile; of a DOCKERFILE it is
    the folder it lies in. Only files that the build uses are sent, less those of .dockerignore. IMAGE is
    [registry/]name[:tag], or template://NAME for a template of the node; either may stand after FROM.

    Leaving with Ctrl-C does not end the build: `aenv template logs` follows it again. A failed build exits with 1 and
    names the line; a later one goes on from the last step that has not changed. With --json, one document a line.
    """
    from agentenv.cli.api import Api
    from agentenv.cli.build_follow import follow

    found = find_source(source, dockerfile)
    upload = Upload(found, build_arg, given["target"]) if isinstance(found, DockerfileSource) else None
    if upload is None and (build_arg or given["target"]):
        raise click.UsageError(f"--build-arg and --target are for Dockerfiles, and {source!r} is taken as an image")
    with Api() as api:
        job = _started(api, found, upload, name or found.default_name, given)
        template_id, build_id = job["templateID"], job["buildID"]
        if given["detach"]:
            _say_detached(job, as_json)
            return
        follow(api, template_id, build_id, as_json)
    if as_json:
        print_json_line({"status": "ready", "templateID": template_id, "buildID": build_id, "names": job["names"], "tags": job["tags"]})
    else:
        click.echo(_full_name(job))


def _started(api: Api, found: DockerfileSource | ImageSource, upload: Upload | None, name: str, given: dict[str, Any]) -> dict[str, Any]:
    wanted = {"name": name, "tags": list(given["tags"]) or None, "cpuCount": given["cpu"], "memoryMB": given["memory"]}
    job = api.request_build({key: value for key, value in wanted.items() if value is not None})
    body: dict[str, Any] = {"force": given["no_cache"], "startCmd": given["start_cmd"], "readyCmd": given["ready_cmd"]}
    if upload is not None:
        for warning in upload.dockerfile.warnings:
            warn(warning)
        with ProgressReport() as report:
            files = upload.send(api, job["templateID"], report)
        body["dockerfile"] = upload.body(files, start=not given["no_start"])
    elif isinstance(found, ImageSource) and found.reference.startswith("template://"):
        body["fromTemplate"] = found.reference.removeprefix("template://")
    elif isinstance(found, ImageSource):
        body["fromImage"] = found.reference
    api.start_build(job["templateID"], job["buildID"], body)
    return job


def _say_detached(job: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json_line({"status": "building", "templateID": job["templateID"], "buildID": job["buildID"], "names": job["names"]})
    else:
        click.echo(job["buildID"])
        info(f"`aenv template logs {job['buildID']}` follows it")


def _full_name(job: dict[str, Any]) -> str:
    name = (job.get("names") or job.get("aliases") or [job["templateID"]])[0]
    tag = (job.get("tags") or ["default"])[0]
    return str(name) if tag == "default" else f"{name}:{tag}"
