"""Volumes: directory trees that sandboxes mount and that outlive them (contract section 2.9). Their content has routes of its own."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import unquote

from fastapi import APIRouter, Depends
from starlette.responses import Response

from agentenv.api.context import Context
from agentenv.api.models import NewVolumeBody
from agentenv.api.request_parts import json_body
from agentenv.api.views import VolumeView, VolumeWithTokenView, volume_view, volume_with_token_view

router = APIRouter()


@router.post("/volumes", status_code=201, response_model=None)
async def create(context: Context, body: Annotated[NewVolumeBody, Depends(json_body(NewVolumeBody))]) -> VolumeWithTokenView:
    """A new empty volume and the token for its content; 400 when the name is taken."""
    return volume_with_token_view(await context.orchestrator.volumes.create(body.name))


@router.get("/volumes", response_model=None)
async def list_all(context: Context) -> list[VolumeView]:
    """Every volume, without tokens."""
    return [volume_view(volume) for volume in context.orchestrator.volumes.all()]


@router.get("/volumes/{volume_id}", response_model=None)
async def read(context: Context, volume_id: str) -> VolumeWithTokenView:
    """One volume with its token."""
    return volume_with_token_view(context.orchestrator.volumes.get(unquote(volume_id)))


@router.delete("/volumes/{volume_id}", status_code=204)
async def delete(context: Context, volume_id: str) -> Response:
    """Delete it with all it holds, also while sandboxes mount it; 404 the second time."""
    await context.orchestrator.volumes.delete(unquote(volume_id))
    return Response(status_code=204)
