"""Who asks a registry: what the caller gave with this call, else what the node's `docker login` left.

skopeo reads credentials from a file in Docker's form (`auths`, credential helpers and all). Given ones go into such a file of
their own, readable by the owner only, for the time of one call: never into arguments, which everybody on the machine can see.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.core.errors import InvalidInput
from agentenv.image.reference import DOCKER_HUB

DOCKER_HUB_KEY = "https://index.docker.io/v1/"
IDENTITY_TOKEN = "<token>"
"""The user name of a login whose password is a token to get others with, as credential helpers have it."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """For one registry."""

    username: str
    password: str = field(repr=False)


def registry_name(given: str) -> str:
    """A registry as docker configurations name it (`https://index.docker.io/v1/`, `host/`), by its name in references."""
    host = given.partition("://")[2] or given
    host = host.partition("/")[0].lower()
    return DOCKER_HUB if host in ("index.docker.io", "registry-1.docker.io", DOCKER_HUB) else host


def auth_entry(registry: str, login: Credentials) -> dict[str, str]:
    """A login as Docker's config has it. InvalidInput."""
    if ":" in login.username or not login.username:
        raise InvalidInput(f"the user name for {registry} must not be empty and cannot hold a colon")
    if login.username == IDENTITY_TOKEN:
        return {"auth": base64.b64encode(f"{IDENTITY_TOKEN}:".encode()).decode(), "identitytoken": login.password}
    return {"auth": base64.b64encode(f"{login.username}:{login.password}".encode()).decode()}


@contextlib.contextmanager
def auth_file(registry: str, given: Credentials | None, docker_config: Path, folder: Path) -> Iterator[Path]:
    """The file to let skopeo read while the body runs. Given credentials are for `registry` alone, not for its mirrors."""
    if given is None and docker_config.is_file():
        yield docker_config
        return
    auths: dict[str, dict[str, str]] = {}
    if given is not None:
        auths[DOCKER_HUB_KEY if registry == DOCKER_HUB else registry] = auth_entry(registry, given)
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".auth-")  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as out:
            json.dump({"auths": auths}, out)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
