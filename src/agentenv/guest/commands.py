"""Commands of the host in a guest: what is asked of envd, and the stream of events it answers with (contract sections 3.3, 3.4).

Nothing here dials: `guest.client` does. Output is handed on as it comes and never kept.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from agentenv.core.errors import Internal, InvalidInput

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], object]
OnStart = Callable[[], object]
_MESSAGE_MAX_BYTES = 4 << 20  # envd sends output in far smaller pieces; the guest must not make the host keep more

_LOGIN_SHELL = 'if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; else exec /bin/sh -l -c "$1"; fi'
#: The same with the PATH that the command is given: a login shell sets its own.
_LOGIN_SHELL_WITH_PATH = (
    'run=\'PATH=$1; export PATH; eval "$2"\'; if [ -x /bin/bash ]; then exec /bin/bash -l -c "$run" bash "$PATH" "$1"; '
    'else exec /bin/sh -l -c "$run" sh "$PATH" "$1"; fi'
)


class CommandRefused(InvalidInput):
    """The guest's agent did not start a command. The message is `<code>: <text>` with a code of the Connect protocol."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program with its arguments, as whom and where it runs. `env_vars` are added to the guest's own."""

    argv: tuple[str, ...]
    user: str = "root"
    workdir: str = ""
    env_vars: dict[str, str] = field(default_factory=dict)
    access_token: str = field(default="", repr=False)  # of guests that ask for one

    @classmethod
    def in_login_shell(
        cls, command: str, user: str, workdir: str, env_vars: dict[str, str] | None = None, access_token: str = ""
    ) -> Command:
        """A shell command as the SDKs run theirs: in a login shell, bash where the guest has it. A PATH among `env_vars` holds in it."""
        script = _LOGIN_SHELL_WITH_PATH if env_vars and "PATH" in env_vars else _LOGIN_SHELL
        return cls(("/bin/sh", "-c", script, "sh", command), user, workdir, dict(env_vars or {}), access_token)

    def headers(self) -> dict[bytes | str, bytes | str]:
        """Of the request that starts it; the user travels as a name without a password, and a group of `user:group` beside it."""
        name, _, group = self.user.partition(":")
        found: dict[bytes | str, bytes | str] = {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Authorization": "Basic " + base64.b64encode(f"{name}:".encode()).decode(),
        }
        if group:
            found["X-User-Group"] = group
        return found | {"X-Access-Token": self.access_token} if self.access_token else found

    def body(self) -> bytes:
        """Of the request that starts it."""
        process: dict[str, Any] = {"cmd": self.argv[0], "args": list(self.argv[1:]), "envs": self.env_vars}
        if self.workdir:
            process["cwd"] = self.workdir
        return connect_frame(json.dumps({"process": process, "stdin": False}).encode())


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. `status` says it in words, such as `exit status 1` or `signal: killed`."""

    exit_code: int
    status: str


def connect_frame(message: bytes) -> bytes:
    """One enveloped message of a Connect stream (contract section 3.3)."""
    return struct.pack(">BI", 0, len(message)) + message


async def follow(chunks: AsyncIterable[bytes], on_output: OnOutput, status: int, on_start: OnStart = lambda: None) -> Ended:
    """Read the events of one process to its end. CommandRefused; Internal when the stream is none, `status` being the reply's."""
    buffer, ended = b"", None
    async for chunk in chunks:
        buffer += chunk
        while len(buffer) >= 5 and len(buffer) >= 5 + (size := int.from_bytes(buffer[1:5], "big")):
            is_last, body, buffer = buffer[0] & 2, _parse(buffer[5 : 5 + size]), buffer[5 + size :]
            if is_last and "error" in body:
                error = body["error"]
                raise CommandRefused(f"{error.get('code', 'unknown')}: {error.get('message', '')}")
            event = body.get("event", {})
            if "start" in event:
                on_start()
            ended = _take(event, on_output) or ended
        if len(buffer) > _MESSAGE_MAX_BYTES:
            raise Internal(f"envd sent a message of more than {_MESSAGE_MAX_BYTES} bytes")
    if ended is None:
        raise Internal(f"envd answered {status} without an end of the process")
    return ended


def _parse(message: bytes) -> dict[str, Any]:
    try:
        body = json.loads(message)
    except ValueError as error:
        raise Internal(f"envd sent no JSON: {message[:200]!r}") from error
    return body if isinstance(body, dict) else {}


def _take(event: dict[str, Any], on_output: OnOutput) -> Ended | None:
    data = event.get("data", {})
    streams: tuple[Stream, ...] = ("stdout", "stderr")
    for stream in streams:
        if data.get(stream):
            on_output(stream, base64.b64decode(data[stream]))
    if "end" not in event:
        return None
    end = event["end"]
    code = int(end.get("exitCode", 0))
    return Ended(code, str(end.get("status") or f"exit status {code}"))
