"""Whom a build asks registries as: an account that is given, and what docker's config of whoever builds has for the images it names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.output import warn

if TYPE_CHECKING:
    from agentenv.template.dockerfile.stages import Dockerfile

Accounts = dict[str, dict[str, str]]


def registries_of(dockerfile: Dockerfile) -> list[str]:
    """The registries of the images that a Dockerfile names, in its order."""
    names = [stage.base.name for stage in dockerfile.stages if stage.base.kind == "image"]
    return list(dict.fromkeys(registry for name in names if (registry := registry_of(name))))


def registry_of(image: str) -> str:
    """The registry of an image; empty when that is no name of one: the node says so."""
    from agentenv.core.errors import InvalidInput
    from agentenv.image.reference import parse

    try:
        return parse(image).registry
    except InvalidInput:
        return ""


def accounts(registries: list[str], given: dict[str, str] | None, registry: str | None, config: Path | None) -> Accounts:
    """What to send: only for the registries that are asked. The given account is for `registry`, else for the only one there is."""
    from agentenv.image.credentials import registry_name

    if registry is not None and given is None:
        raise click.UsageError("--registry goes with --username")
    found = _of_config(registries, config)
    if given is None:
        return found
    wanted = registry_name(registry) if registry is not None else registries[0] if len(registries) == 1 else ""
    if not wanted:
        named = ", ".join(registries) or "none"
        raise click.UsageError(f"--username is for one registry, and the build asks {named}: say which with --registry")
    return {**found, wanted: given}


def _of_config(registries: Iterable[str], config: Path | None) -> Accounts:
    from agentenv.core.errors import AgentEnvError
    from agentenv.image.docker_config import DockerConfig

    found: Accounts = {}
    docker = DockerConfig(config or DockerConfig.default())
    for registry in registries:
        try:
            login = docker.login(registry)
        except AgentEnvError as error:  # the node may have a login, or the image be public
            warn(error.message)
            continue
        if login is not None:
            found[registry] = {"type": "registry", "username": login.username, "password": login.password}
    return found
