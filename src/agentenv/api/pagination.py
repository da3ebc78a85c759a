"""Page tokens (contract section 2.1): base64url of `<RFC 3339 time>__<id>[__asc]`, opaque to clients.

The part before `__asc` is the position the orchestrator gave out; only it may read it. The order travels in the token, so a
client that names it on the first page only still gets one consistent list.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, TypeVar

from fastapi import Query
from starlette.responses import Response

from agentenv.api.timestamps import parse_rfc3339_us
from agentenv.core.clock import rfc3339
from agentenv.core.errors import InvalidInput
from agentenv.core.model import Page

T = TypeVar("T")
MAX_LIMIT = 100
NEXT_TOKEN_HEADER = "x-next-token"
TOTAL_RUNNING_HEADER = "X-Total-Running"
_TOKEN_LIMIT = 512  # characters; ours are about 80
_ASCENDING = "__asc"

Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT)]
NextToken = Annotated[str | None, Query(alias="nextToken")]


def encode_token(position: str, *, ascending: bool = False) -> str:
    """The `nextToken` that continues after `position`."""
    text = position + (_ASCENDING if ascending else "")
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_token(token: str) -> tuple[str, bool]:
    """Position and whether the list is ascending. InvalidInput when the token is none of ours."""
    try:
        if not 0 < len(token) <= _TOKEN_LIMIT:
            raise ValueError("impossible length")
        bare = token.rstrip("=")
        text = base64.b64decode(bare + "=" * (-len(bare) % 4), altchars=b"-_", validate=True).decode("ascii")
        position = text.removesuffix(_ASCENDING)
        if not position or not position.isprintable():
            raise ValueError("no position in it")
    except (ValueError, binascii.Error) as error:
        raise _bad_token() from error
    return position, text.endswith(_ASCENDING)


def page_of(limit: int, next_token: str | None, order: Order | None) -> Page:
    """The page a caller asks for. InvalidInput: foreign token, or an order that is not the one the token continues."""
    if not next_token:
        return Page(limit=limit, ascending=order == "asc")
    position, ascending = decode_token(next_token)
    if order is not None and ascending != (order == "asc"):
        raise InvalidInput(f"order: {order} is not the order the nextToken was made with", "repeat the first page with the new order")
    return Page(limit=limit, after=position, ascending=ascending)


def make_position(at_ms: int, item_id: str) -> str:
    """A position in a list that is sorted by time, then id."""
    return f"{rfc3339(at_ms)}__{item_id}"


def parse_position(position: str) -> tuple[int, str]:
    """The inverse of `make_position`. InvalidInput when it is none."""
    at, separator, item_id = position.partition("__")
    try:
        if not separator or not item_id:
            raise ValueError("not time__id")
        return parse_rfc3339_us(at) // 1000, item_id
    except ValueError as error:
        raise _bad_token() from error


def cut_page(items: Iterable[T], position: Callable[[T], tuple[int, str]], page: Page, response: Response) -> list[T]:
    """One page of `items`, newest first by `position` (time in ms, id), and in `response` the header that leads to the next one.

    The header is absent on the last page. InvalidInput when the page's place is none that `make_position` made.
    """
    ordered = sorted(items, key=position, reverse=True)
    if page.after is not None:
        last = parse_position(page.after)
        ordered = [item for item in ordered if position(item) < last]
    part = ordered[: page.limit]
    if len(ordered) > len(part):
        response.headers[NEXT_TOKEN_HEADER] = encode_token(make_position(*position(part[-1])))
    return part


def _bad_token() -> InvalidInput:
    return InvalidInput("nextToken: not a token of this server", "use the x-next-token header of the previous page unchanged")
