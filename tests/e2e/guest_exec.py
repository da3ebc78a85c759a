"""Programs started in a guest by their arguments, as clients of the process service do it: no shell has a part in it."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import httpx

from agentenv.guest.commands import Command


@dataclass(frozen=True)
class Said:
    """What a program said and how it ended; `error` when it was not started."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = -1
    error: str = ""


def execute(sandbox: Any, *argv: str, user: str = "", cwd: str = "", timeout_s: float = 60) -> Said:
    """Run `argv` as `user`, or as the template's own, and wait for its end."""
    command = Command(argv, user, cwd)
    headers = {str(name): str(value) for name, value in command.headers().items()}
    if not user:
        del headers["Authorization"]
    options = sandbox.connection_config
    headers |= {"X-Access-Token": sandbox._envd_access_token or "", "E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    url = options.get_sandbox_url(sandbox.sandbox_id, sandbox.sandbox_domain)
    reply = httpx.post(f"{url}/process.Process/Start", headers=headers, content=command.body(), timeout=timeout_s)
    said: dict[str, bytes] = {"stdout": b"", "stderr": b""}
    code, rest = -1, reply.content
    while rest:
        size = int.from_bytes(rest[1:5], "big")
        message, rest = json.loads(rest[5 : 5 + size]), rest[5 + size :]
        if "error" in message:
            return Said(error=f"{message['error']['code']}: {message['error']['message']}")
        event = message.get("event", {})
        for stream in said:
            said[stream] += base64.b64decode(event.get("data", {}).get(stream, ""))
        code = event["end"].get("exitCode", 0) if "end" in event else code
    return Said(said["stdout"].decode(), said["stderr"].decode(), code)
