"""Routes of the contract that this node does not offer: a clear 501 that names the route, after the key was checked.

These are of the first builder: its clients push an image to a registry of the service, which no client of today does.
A route that gets built leaves this table in the same change.
"""

from __future__ import annotations

from typing import Never

from fastapi import APIRouter
from starlette.requests import Request

from agentenv.core.errors import Unsupported

ROUTES: tuple[tuple[str, str], ...] = (
    ("POST", "/templates"),
    ("POST", "/templates/{template_id}"),
    ("POST", "/templates/{template_id}/builds/{build_id}"),
)

router = APIRouter()


async def _refuse(request: Request) -> Never:
    raise Unsupported(
        f"{request.method} {request.scope['route'].path}: this node does not offer it", "use a newer client: it builds with /v3/templates"
    )


for _method, _path in ROUTES:
    router.add_api_route(_path, _refuse, methods=[_method], response_model=None)
