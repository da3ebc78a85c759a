"""Docker's `config.json`: who asks which registry, in the file itself or by a credential helper (`docker-credential-<name>`).

A helper for a registry (`credHelpers`) goes before the one for all (`credsStore`), and that before `auths`. Secrets travel by pipes,
never in arguments.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentenv.core.errors import HostNotReady, InvalidInput, PermissionDenied
from agentenv.image.credentials import DOCKER_HUB_KEY, IDENTITY_TOKEN, Credentials, registry_name
from agentenv.image.reference import DOCKER_HUB

CONFIG_MAX_BYTES = 1 << 20
HELPER_DEADLINE_S = 30.0
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NOT_FOUND = "credentials not found"  # how every helper words it, by Docker's protocol


class DockerConfig:
    """One config file. A file that is missing has no logins."""

    def __init__(self, path: Path) -> None:
        """InvalidInput when it is no config file. Blocks."""
        self._path = path
        self._content = _read(path)

    @staticmethod
    def default() -> Path:
        """Where docker itself looks."""
        folder = os.environ.get("DOCKER_CONFIG")
        return (Path(folder) if folder else Path.home() / ".docker") / "config.json"

    def helper_of(self, registry: str) -> str:
        """The helper that has a registry's login; empty when it is in the file, or nowhere."""
        helpers = self._section("credHelpers")
        named = next((helper for name, helper in helpers.items() if registry_name(name) == registry), self._content.get("credsStore", ""))
        return named if isinstance(named, str) else ""

    def login(self, registry: str) -> Credentials | None:
        """The login for a registry, by its name in references. HostNotReady and PermissionDenied tell of the helper. Blocks."""
        helper = self.helper_of(registry)
        if helper and (found := ask_helper(helper, registry)) is not None:
            return found
        for name, entry in self._section("auths").items():
            if registry_name(name) == registry and isinstance(entry, dict) and (login := _of_entry(entry)) is not None:
                return login
        return None

    def logins(self, registries: Iterable[str]) -> dict[str, Credentials]:
        """Those that there are for some registries. Blocks."""
        found = {registry: self.login(registry) for registry in registries}
        return {registry: login for registry, login in found.items() if login is not None}

    def _section(self, name: str) -> dict[str, Any]:
        section = self._content.get(name)
        return section if isinstance(section, dict) else {}


def ask_helper(helper: str, registry: str) -> Credentials | None:
    """What a helper has for a registry; None: nothing. HostNotReady (no such helper), PermissionDenied (it fails). Blocks."""
    program = f"docker-credential-{helper}"
    if not _HELPER.fullmatch(helper) or shutil.which(program) is None:
        raise HostNotReady(
            f"the login for {registry} is in the credential helper {program[:100]!r}, which is not there",
            "install it, or take it out of docker's config.json",
        )
    server = DOCKER_HUB_KEY if registry == DOCKER_HUB else registry
    try:
        done = subprocess.run([program, "get"], input=server.encode(), capture_output=True, timeout=HELPER_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PermissionDenied(f"{program} did not give the login for {registry}: {type(error).__name__}", "try it by hand") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        if _NOT_FOUND in said.lower():
            return None
        raise PermissionDenied(f"{program} did not give the login for {registry}: {said[:300]}", "log in again")
    try:
        answer = json.loads(done.stdout)
        login = Credentials(str(answer["Username"]), str(answer["Secret"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PermissionDenied(f"{program} answered something that is no login for {registry}", "see whether it is up to date") from error
    return login if login.password else None


def _of_entry(entry: dict[str, Any]) -> Credentials | None:
    if isinstance(token := entry.get("identitytoken"), str) and token:
        return Credentials(IDENTITY_TOKEN, token)
    try:
        both = base64.b64decode(str(entry.get("auth", "")), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    username, colon, password = both.partition(":")
    return Credentials(username, password.rstrip("\0")) if colon and username else None


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > CONFIG_MAX_BYTES:
            raise InvalidInput(f"{path} has more than {CONFIG_MAX_BYTES >> 10} KiB", "is it docker's config.json?")
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}", "is it docker's config.json?") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} is no object", "is it docker's config.json?")
    return content
