"""The teams of a key's holder (contract section 2.7): a node is one team."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from agentenv.api.auth import presented_key
from agentenv.core.references import NAMESPACE

router = APIRouter()
TEAM_ID = "00000000-0000-4000-8000-000000000001"  # the contract wants a UUID; it names nothing else


@router.get("/teams", response_model=None)
async def list_all(request: Request) -> list[dict[str, object]]:
    """The one team; its key is the one the caller came with."""
    return [{"teamID": TEAM_ID, "name": NAMESPACE, "apiKey": presented_key(request), "isDefault": True}]
