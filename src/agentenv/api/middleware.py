"""What happens around every request: its id, its log line, and the answer to errors nobody expected.

Secrets (keys, tokens, query strings, bodies) are never logged. Paths are logged as they arrived, percent-encoded, so a caller
cannot write its own log lines.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentenv.api.errors import error_response
from agentenv.core.ids import new_run_id
from agentenv.core.spans import Spans, recording, server_timing

_log = logging.getLogger("agentenv.api.request")
REQUEST_ID_HEADER = "X-Request-Id"
TIMING_HEADER = "Server-Timing"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_PATH_LIMIT = 200  # characters of a path in the log


class RawPath:
    """Routes on the path as it was sent: `%2F` inside an id does not split it, and is decoded after routing (contract section 2.1)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        raw_path = scope.get("raw_path")
        if scope["type"] == "http" and raw_path:
            scope = {**scope, "path": raw_path.decode("latin-1")}
        await self._app(scope, receive, send)


class RequestLog:
    """Gives each request an id, logs one line when it ends, and turns a stray exception into a 500 that names that id.

    A call whose steps are timed says in `Server-Timing` where its time went.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = _request_id(scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        status = 0
        spans: Spans = {}

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(REQUEST_ID_HEADER.lower().encode(), request_id.encode())]
                if spans:
                    more.append((TIMING_HEADER.lower().encode(), server_timing(spans).encode()))
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        try:
            with recording() as spans:
                await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            _log.info("caller left before its request was read", extra={"request_id": request_id})
        except Exception:
            _log.exception("unexpected error, request %s", request_id, extra={"request_id": request_id})
            if status:
                raise  # half an answer is out; only closing the connection is honest now
            response = error_response(
                500, f"internal error {request_id}\nlook for this id in the server's log", "internal", path=scope["path"]
            )
            await response(scope, receive, send_with_id)
        finally:
            _write_line(scope, state, request_id, status, (time.monotonic() - started) * 1000)


def _write_line(scope: Scope, state: dict[str, Any], request_id: str, status: int, duration_ms: float) -> None:
    path = scope["path"].encode("unicode_escape").decode()[:_PATH_LIMIT]  # no line breaks or control characters in the log
    fields = {
        "request_id": request_id,
        "method": scope["method"],
        "path": path,
        "status": status,
        "duration_ms": round(duration_ms, 1),
        "caller": state.get("caller", ""),
    }
    level = logging.WARNING if status >= 500 else logging.INFO
    _log.log(level, "%s %s %d %.1f ms, request %s", scope["method"], path, status, duration_ms, request_id, extra=fields)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode())
    return new_run_id()
