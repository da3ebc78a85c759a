"""Secrets: named values that are stored encrypted and never given back (contract section 2.9). A name stands for its id everywhere."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import unquote

from fastapi import APIRouter, Depends
from starlette.responses import Response

from agentenv.api.context import Context
from agentenv.api.models import NewSecretBody, SecretUpdateBody
from agentenv.api.pagination import MAX_LIMIT, Limit, NextToken, cut_page, page_of
from agentenv.api.request_parts import json_body
from agentenv.api.views import SecretView, secret_view

router = APIRouter()


@router.post("/secrets", status_code=201, response_model=None)
async def create(context: Context, body: Annotated[NewSecretBody, Depends(json_body(NewSecretBody))]) -> SecretView:
    """A new secret, version 1; 409 when the name is taken."""
    return secret_view(await context.orchestrator.secrets.create(body.name, body.value, body.metadata))


@router.get("/secrets", response_model=None)
async def list_page(context: Context, response: Response, limit: Limit = MAX_LIMIT, next_token: NextToken = None) -> list[SecretView]:
    """A page of secrets, newest first; `x-next-token` is absent on the last one."""
    secrets = context.orchestrator.secrets.all()
    page = page_of(limit, next_token, None)
    part = cut_page(secrets, lambda secret: (secret.created_at_ms, secret.secret_id), page, response)
    return [secret_view(secret) for secret in part]


@router.get("/secrets/{secret_id}", response_model=None)
async def read(context: Context, secret_id: str) -> SecretView:
    """One secret, without its value."""
    return secret_view(context.orchestrator.secrets.find(unquote(secret_id)))


@router.post("/secrets/{secret_id}", response_model=None)
async def update(context: Context, secret_id: str, body: Annotated[SecretUpdateBody, Depends(json_body(SecretUpdateBody))]) -> SecretView:
    """Another value under the next version; metadata that is given replaces what is stored."""
    return secret_view(await context.orchestrator.secrets.update(unquote(secret_id), body.value, body.metadata))


@router.delete("/secrets/{secret_id}", status_code=204)
async def delete(context: Context, secret_id: str) -> Response:
    """Forget it; 404 the second time."""
    await context.orchestrator.secrets.delete(unquote(secret_id))
    return Response(status_code=204)
