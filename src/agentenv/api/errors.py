"""Every failure as the one error body of the contract (section 2.1): `{"code": status, "message": text, "error_code": slug}`.

Below `/volumecontent` the slug is the `code` itself: that part of the contract has a text there (section 2.9).

Deliberate errors carry their status themselves, so a new class of `core.errors` needs no change here. Clients repeat
429/502/503/504 unless told not to, therefore every reply says whether a repeat helps: `Should-Retry: false`, or `Retry-After`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentenv.core.errors import AgentEnvError, InvalidInput, all_errors

RETRY_AFTER_S = 1  # starts and restores take well under a second, so a second later room is likely
_WAIT_STATUSES = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_MESSAGE_LIMIT = 4096  # characters; a message quotes what the caller sent, which may be megabytes
_TEXT_CODES_BELOW = "/volumecontent/"
_SLUGS = {413: "body_too_large", 408: "body_too_slow", 422: "idempotency_request_mismatch"}


def error_table() -> dict[str, int]:
    """Every stable `error_code` of the product's own errors and its HTTP status."""
    return {cls.code: cls.status for cls in all_errors()}


def error_body(status: int, message: str, error_code: str) -> dict[str, object]:
    """The body of every reply of 400 and above; `code` always equals the HTTP status."""
    return {"code": status, "message": message[:_MESSAGE_LIMIT], "error_code": error_code}


def error_response(
    status: int, message: str, error_code: str, *, retryable: bool = False, headers: dict[str, str] | None = None, path: str = ""
) -> Response:
    """A complete error reply to a request for `path`. ASCII JSON, since a message may quote text that UTF-8 cannot carry."""
    retry = {"Should-Retry": "false"}
    if retryable:
        retry = {"Retry-After": str(RETRY_AFTER_S)} if status in _WAIT_STATUSES else {}
    body = error_body(status, message, error_code)
    if path.startswith(_TEXT_CODES_BELOW):
        body = {"code": error_code, "message": body["message"]}
    content = json.dumps(body).encode()
    return Response(content, status, headers={**retry, **(headers or {})}, media_type="application/json")


def full_message(error: AgentEnvError) -> str:
    """Cause and next step, each on its own line."""
    return f"{error.message}\n{error.hint}" if error.hint else error.message


def from_validation(errors: ValidationError | RequestValidationError) -> InvalidInput:
    """The first thing that is wrong with a request, by the name the caller used for it."""
    first = errors.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path", "header"))
    reason = str(first["msg"]).removeprefix("Value error, ")
    return InvalidInput(f"{where}: {reason}" if where else reason)


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Let `app`, made of `routes`, answer every raised error in the contract's shape.

    What nobody expects is answered by `middleware.RequestLog`.
    """
    app.state.error_routes = [route for route in routes if isinstance(route, Route)]
    app.add_exception_handler(AgentEnvError, _on_deliberate)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_deliberate(request: Request, error: Exception) -> Response:
    if not isinstance(error, AgentEnvError):
        raise error
    headers = {"WWW-Authenticate": "Bearer"} if error.status == HTTPStatus.UNAUTHORIZED else None
    return error_response(
        error.status, full_message(error), error.code, retryable=error.retryable, headers=headers, path=request.scope["path"]
    )


async def _on_validation(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    return await _on_deliberate(request, from_validation(error))


async def _on_http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    status = error.status_code
    message = str(error.detail)
    headers = dict(error.headers or {})
    if status == HTTPStatus.NOT_FOUND:
        message = f"no route {request.method} {request.scope['path'][:200]}"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"method {request.method} is not allowed on {request.scope['path'][:200]}"
        headers["Allow"] = ", ".join(_allowed_methods(request))
    slug = _SLUGS.get(status) or HTTPStatus(status).phrase.lower().replace(" ", "_")
    return error_response(status, message, slug, headers=headers, path=request.scope["path"])


def _allowed_methods(request: Request) -> list[str]:
    """All of the path's methods; the framework knows only those of the first route that matched."""
    matching = (route for route in request.app.state.error_routes if route.path_regex.match(request.scope["path"]))
    return sorted({method for route in matching for method in route.methods or ()})
