"""Routes of the contract that this node does not offer yet: a clear 501 that names the route, after the key was checked.

A route that gets built leaves this table in the same change.
"""

from __future__ import annotations

from typing import Never

from fastapi import APIRouter
from starlette.requests import Request

from agentenv.core.errors import Unsupported

ROUTES: tuple[tuple[str, str], ...] = (
    ("POST", "/templates"),
    ("POST", "/v2/templates"),
    ("POST", "/v3/templates"),
    ("POST", "/templates/{template_id}"),
    ("GET", "/templates/{template_id}/files/{files_hash}"),
    ("POST", "/templates/{template_id}/builds/{build_id}"),
    ("POST", "/v2/templates/{template_id}/builds/{build_id}"),
    ("GET", "/templates/{template_id}/builds/{build_id}/status"),
    ("GET", "/templates/{template_id}/builds/{build_id}/logs"),
)

router = APIRouter()


async def _refuse(request: Request) -> Never:
    raise Unsupported(f"{request.method} {request.scope['route'].path}: this node does not offer it")


for _method, _path in ROUTES:
    router.add_api_route(_path, _refuse, methods=[_method], response_model=None)
