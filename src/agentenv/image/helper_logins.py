"""Logins that credential helpers have, for layers that blockd reads from registries as needed: it asks no helpers itself.

They are in one file in the form of docker's config, for the owner only, which goes with the next boot of the machine. Helpers give
passwords that end (often after hours), so they are asked again while such layers are there.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection
from pathlib import Path

from agentenv.core.errors import AgentEnvError
from agentenv.host.files import write_atomic
from agentenv.image.credentials import IDENTITY_TOKEN, auth_entry
from agentenv.image.docker_config import DockerConfig

_log = logging.getLogger(__name__)


class HelperLogins:
    """The file of one node. Safe to use from several threads; blocks."""

    def __init__(self, path: Path, docker_config: Path) -> None:
        self._path, self._docker_config = path, docker_config
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, str]] = {}

    def refresh(self, registries: Collection[str]) -> None:
        """Ask the helpers of these registries anew. Never fails: what cannot be had is said in the log, and its former login stays."""
        with self._lock:
            try:
                config = DockerConfig(self._docker_config)
            except AgentEnvError as error:
                _log.warning("no credential helper is asked: %s", error)
                return
            before = dict(self._known)
            for registry in registries:
                try:
                    self._ask(config, registry)
                except AgentEnvError as error:
                    _log.warning("%s", error)
            if self._known != before or (not self._path.exists() and self._known):
                self._write()

    def _ask(self, config: DockerConfig, registry: str) -> None:
        login = config.login(registry) if config.helper_of(registry) else None
        if login is None or login.username == IDENTITY_TOKEN:  # with such a token only the program that pulls can do something
            self._known.pop(registry, None)
        else:
            self._known[registry] = auth_entry(registry, login)

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps({"auths": self._known}).encode(), 0o600)
        except OSError as error:
            _log.warning("logins of credential helpers cannot be handed to blockd: %s", error)
