"""Reading ids and bodies out of requests: the only place that meets raw bytes of callers.

Path ids arrive percent-encoded (see `middleware.RawPath`) and are decoded here, after routing, so an id may hold any byte
without reaching another route. Bodies are JSON whatever their content type says, may be chunked, and are read only up to the limit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Never, TypeVar
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from fastapi import Depends, Path
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from agentenv.api.context import Context
from agentenv.api.errors import from_validation
from agentenv.core.errors import InvalidInput, NotFound
from agentenv.core.ids import SANDBOX_ID
from agentenv.core.references import check_tag, parse_reference

BODY_DEADLINE_S = 60.0  # a caller that sends a body slower than this keeps a connection for nothing
_QUOTED_LIMIT = 80  # characters of an id that an error repeats

CHUNK_BYTES = 1 << 20  # of a body that is stored: what a transfer holds in memory
CHUNK_DEADLINE_S = 60.0  # the SDKs give up on a stream that stands still for as long

BodyT = TypeVar("BodyT", bound=BaseModel)
_body_models: WeakKeyDictionary[Callable[..., object], type[BaseModel]] = WeakKeyDictionary()  # what `json_body` made, for the document


async def body_chunks(request: Request) -> AsyncIterator[bytes]:
    """A body of any size in pieces worth writing, `CHUNK_BYTES` or a little more. HTTPException 408 when it stands still."""
    buffer = bytearray()
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(CHUNK_DEADLINE_S):
                part = await anext(stream, None)
        except TimeoutError as error:
            raise HTTPException(408, f"nothing of the body arrived for {CHUNK_DEADLINE_S:.0f} seconds", {"Connection": "close"}) from error
        if part is not None:
            buffer += part
        if buffer and (part is None or len(buffer) >= CHUNK_BYTES):
            yield bytes(buffer)
            buffer.clear()
        if part is None:
            return


def sandbox_not_found(sandbox_id: str) -> NotFound:
    """The contract's words for a sandbox that is not there (section 2.1)."""
    return NotFound(f"Sandbox \"{sandbox_id[:_QUOTED_LIMIT]}\" doesn't exist or you don't have access to it")


def _sandbox_id(sandbox_id: Annotated[str, Path()]) -> str:
    given = unquote(sandbox_id)
    bare = given.partition("-")[0]  # `<id>-<clientID>` is the form of old clients
    if not SANDBOX_ID.fullmatch(bare):
        raise sandbox_not_found(given)
    return bare


SandboxId = Annotated[str, Depends(_sandbox_id)]


def template_in_path(segment: str) -> str:
    """A template reference out of a path, without its namespace. NotFound when it cannot be one, since nothing has such a name."""
    given = unquote(segment)
    try:
        return str(parse_reference(given))
    except InvalidInput as error:
        raise NotFound(f"template '{given.strip()[:_QUOTED_LIMIT]}' not found", error.hint) from error


def tag_in_path(segment: str) -> str:
    """A tag out of a path. NotFound when it cannot be one."""
    try:
        return check_tag(unquote(segment))
    except InvalidInput as error:
        raise NotFound(f"tag '{unquote(segment)[:_QUOTED_LIMIT]}' not found", error.hint) from error


def template_in_body(reference: str) -> str:
    """A template reference out of a body, tidied and without its namespace. InvalidInput, or NotFound in a foreign namespace."""
    return str(parse_reference(reference))


def json_body(model: type[BodyT]) -> Callable[[Request, Context], Awaitable[BodyT]]:
    """A dependency that reads the request's body as `model`. No body counts as `{}`, which `model` may still refuse."""

    async def parse(request: Request, context: Context) -> BodyT:
        raw = await _read(request, context.settings.body_limit_bytes)
        values = _parse_json(raw)
        try:
            return model.model_validate(values)
        except ValidationError as error:
            raise from_validation(error) from error

    _body_models[parse] = model
    return parse


def body_model(dependency: Callable[..., object]) -> type[BaseModel] | None:
    """The model that a dependency made by `json_body` reads; None for any other."""
    return _body_models.get(dependency)


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw, parse_constant=_refuse_constant) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"the body is not valid JSON: {reason}") from error
    if b"\\u" in raw:
        _refuse_lone_surrogates(values)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InvalidInput("the body must be a JSON object")
    return values


def _refuse_lone_surrogates(values: object) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("the body is not valid JSON: it holds half of a surrogate pair, which is no character") from error


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON value")


async def _read(request: Request, limit_bytes: int) -> bytes:
    too_large = HTTPException(413, f"the body is larger than {limit_bytes} bytes", {"Connection": "close"})
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise too_large
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for chunk in request.stream():
                received += chunk
                if len(received) > limit_bytes:
                    raise too_large
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {BODY_DEADLINE_S:.0f} seconds", {"Connection": "close"}) from error
    return bytes(received)
