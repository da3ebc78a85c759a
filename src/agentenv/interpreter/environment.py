"""What the sandbox is: its variables, as the guest agent knows them, and its id.

The server starts before the guest is any sandbox (its process is part of the template's snapshot), so both are asked for at
each execution: a restore, a fork or a new identity changes them under a process that goes on.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest
from tornado.iostream import StreamClosedError

from .limits import ENVIRONMENT_DEADLINE_S

_log = logging.getLogger(__name__)
ENVS_URL = "http://127.0.0.1:49983/envs"
SANDBOX_ID_FILE = Path("/run/e2b/.E2B_SANDBOX_ID")


class Sandbox:
    """Where to ask."""

    def __init__(self, envs_url: str = ENVS_URL, id_file: Path = SANDBOX_ID_FILE) -> None:
        self._envs_url, self._id_file = envs_url, id_file

    async def variables(self, access_token: str | None) -> dict[str, str] | None:
        """The sandbox-wide variables, read with the token that the client sent (contract section 3.2).

        None when they cannot be read, as with no token or a wrong one: what was known before goes on to hold.
        """
        headers = {"X-Access-Token": access_token} if access_token else {}
        wait_s = ENVIRONMENT_DEADLINE_S
        try:
            request = HTTPRequest(self._envs_url, headers=headers, connect_timeout=wait_s, request_timeout=wait_s)
            found = json.loads((await AsyncHTTPClient().fetch(request)).body)
        except (HTTPClientError, StreamClosedError, OSError, ValueError) as problem:
            _log.debug("the sandbox's variables could not be read: %s", problem)
            return None
        if not isinstance(found, dict):
            return None
        return {str(name): str(value) for name, value in found.items()}

    def id(self) -> str:
        """Which sandbox this guest is now; empty when nobody said."""
        try:
            return self._id_file.read_text().strip()
        except OSError:
            return ""
