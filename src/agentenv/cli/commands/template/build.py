"""`aenv template build`: make a template from a Dockerfile, an image or another template."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentenv.cli.build_accounts import accounts, registries_of, registry_of
from agentenv.cli.build_secrets import secrets_option
from agentenv.cli.build_source import DockerfileSource, ImageSource, Upload, find_source
from agentenv.cli.output import ProgressReport, info, print_json_line, warn
from agentenv.cli.registry_account import account_options, read_account
from agentenv.cli.verb import json_option, pairs_option, verb

if TYPE_CHECKING:
    from agentenv.cli.api import Api


@verb("build", section="Templates", aliases=("bd",))
@click.argument("source", metavar="FOLDER|DOCKERFILE|IMAGE")
@click.option("--name", "-n", metavar="NAME[:TAG]", help="What the template is called.  [default: like the folder or image]")
@click.option("--tag", "-t", "tags", multiple=True, help="A tag of it; may be repeated.  [default: default]")
@click.option("--file", "-f", "dockerfile", type=click.Path(path_type=Path), help="The Dockerfile.  [default: FOLDER/Dockerfile]")
@pairs_option("--build-arg", "A value for an ARG of the Dockerfile; may be repeated.")
@secrets_option
@account_options
@click.option("--registry", metavar="HOST", help="Registry that --username is for.  [default: the only one that is asked]")
@click.option(
    "--docker-config",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Docker's config.json with logins for the images named.  [default: yours, helpers included]",
)
@click.option("--target", metavar="STAGE", default="", help="The stage that becomes the template.  [default: the last]")
@click.option("--start-cmd", default="", help="Start this in place of ENTRYPOINT and CMD; it runs in every sandbox of the template.")
@click.option("--ready-cmd", default="", help="The template is captured once this succeeds.  [default: that of HEALTHCHECK]")
@click.option("--no-start", is_flag=True, help="Start neither ENTRYPOINT nor CMD.")
@click.option("--cpu", type=click.IntRange(1, 32), help="Virtual CPUs.  [default: as the base has]")
@click.option("--memory", type=click.IntRange(128, 65536), metavar="MIB", help="Memory in MiB.  [default: as the base has]")
@click.option("--disk", type=click.IntRange(1), metavar="MIB", help="Size of the disk in MiB.  [default: as the base has]")
@click.option("--no-cache", is_flag=True, help="Run every step, whatever is cached.")
@click.option("--detach", "-d", is_flag=True, help="Print the build's id and leave; it goes on.")
@json_option
def command(
    source: str,
    name: str | None,
    dockerfile: Path | None,
    build_arg: dict[str, str],
    secret: dict[str, bytes],
    as_json: bool,
    **given: Any,
) -> None:
    """Make a template from a Dockerfile or an image.

    The name of the template is printed. FOLDER is what COPY copies from, and has the Dockerfile; of a DOCKERFILE it is
    the folder it lies in. Only files that the build uses are sent, less those of .dockerignore. IMAGE is
    [registry/]name[:tag], or template://NAME for a template of the node; either may stand after FROM.

    A secret is for RUN --mount=type=secret: it is in no layer, no key of the cache and no log. Logins for registries are sent
    for the images that are named, as docker does it, and kept no longer than the build.

    Leaving with Ctrl-C does not end the build: `aenv template logs` follows it again. A failed build exits with 1 and
    names the line; a later one goes on from the last step that has not changed. With --json, one document a line.
    """
    from agentenv.cli.api import Api
    from agentenv.cli.build_follow import BuildFailed, follow

    found = find_source(source, dockerfile)
    upload = Upload(found, build_arg, given["target"]) if isinstance(found, DockerfileSource) else None
    if upload is None and (build_arg or secret or given["target"]):
        raise click.UsageError(f"--build-arg, --secret and --target are for Dockerfiles, and {source!r} is taken as an image")
    body = _body(found, upload, secret, given)
    with Api() as api:
        for is_last in (False, True):
            job = _started(api, upload, name or found.default_name, body, given)
            if given["detach"]:
                _say_detached(job, as_json)
                return
            try:
                follow(api, job["templateID"], job["buildID"], as_json)
                break
            except BuildFailed as failure:
                if is_last or upload is None or not failure.on_build:
                    raise
                upload.on_build = failure.on_build
                info("a base image copies files of the folder, too (ONBUILD): build again with them")
    if as_json:
        ids = {"templateID": job["templateID"], "buildID": job["buildID"]}
        print_json_line({"status": "ready", **ids, "names": job["names"], "tags": job["tags"]})
    else:
        click.echo(_full_name(job))


def _body(found: DockerfileSource | ImageSource, upload: Upload | None, secrets: dict[str, bytes], given: dict[str, Any]) -> dict[str, Any]:
    """The request that starts the build, but for its files."""
    body: dict[str, Any] = {"force": given["no_cache"], "startCmd": given["start_cmd"], "readyCmd": given["ready_cmd"]}
    account, registry, config = read_account(given["username"], given["password_stdin"]), given["registry"], given["docker_config"]
    if upload is not None:
        asked = accounts(registries_of(upload.dockerfile), account, registry, config)
        encoded = {name: base64.b64encode(content).decode() for name, content in secrets.items()}
        body["dockerfile"] = {**upload.body({}, start=not given["no_start"]), "secrets": encoded, "registries": asked}
        return body
    assert isinstance(found, ImageSource)
    if found.reference.startswith("template://"):
        if account is not None:
            raise click.UsageError("--username is for images, and a template of the node needs no registry")
        return {**body, "fromTemplate": found.reference.removeprefix("template://")}
    asked = accounts(list(filter(None, [registry_of(found.reference)])), account, registry, config)
    login = asked.get(registry_of(found.reference))
    return {**body, "fromImage": found.reference, **({"fromImageRegistry": login} if login is not None else {})}


def _started(api: Api, upload: Upload | None, name: str, body: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    size = {"cpuCount": given["cpu"], "memoryMB": given["memory"], "diskSizeMB": given["disk"]}
    wanted = {"name": name, "tags": list(given["tags"]) or None, **size}
    job = api.request_build({key: value for key, value in wanted.items() if value is not None})
    if upload is not None:
        for warning in upload.dockerfile.warnings:
            warn(warning)
        with ProgressReport() as report:
            files = upload.send(api, job["templateID"], report)
        body["dockerfile"]["files"] = {str(line): files_hash for line, files_hash in files.items()}
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
