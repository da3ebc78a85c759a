"""Reading templates (contract section 2.7)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.responses import Response

from agentenv.api.context import Context
from agentenv.api.pagination import MAX_LIMIT, NEXT_TOKEN_HEADER, Limit, NextToken, encode_token, make_position, page_of, parse_position
from agentenv.api.request_parts import template_in_path
from agentenv.api.views import TemplateView, build_view, template_view

router = APIRouter()

TemplateInPath = Annotated[str, Path()]


@router.get("/templates", response_model=None)
async def list_all(context: Context) -> list[TemplateView]:
    """All templates, newest first. `teamID` is ignored: a node is one team."""
    return [template_view(template) for template in await context.orchestrator.templates()]


@router.get("/v2/templates", response_model=None)
async def list_page(context: Context, response: Response, limit: Limit = MAX_LIMIT, next_token: NextToken = None) -> list[TemplateView]:
    """A page of templates, newest first; `x-next-token` is absent on the last one."""
    page = page_of(limit, next_token, None)
    ordered = sorted(
        await context.orchestrator.templates(), key=lambda template: (template.created_at_ms, template.template_id), reverse=True
    )
    if page.after is not None:
        last = parse_position(page.after)
        ordered = [template for template in ordered if (template.created_at_ms, template.template_id) < last]
    part = ordered[: page.limit]
    if len(ordered) > len(part):
        response.headers[NEXT_TOKEN_HEADER] = encode_token(make_position(part[-1].created_at_ms, part[-1].template_id))
    return [template_view(template) for template in part]


@router.get("/templates/aliases/{alias}", response_model=None)
async def read_alias(context: Context, alias: TemplateInPath) -> dict[str, object]:
    """Which template a name stands for; 404 when none."""
    template = await context.orchestrator.template(template_in_path(alias))
    return {"templateID": template.template_id, "public": False}


@router.get("/templates/{template_id}", response_model=None)
async def read(context: Context, template_id: TemplateInPath) -> dict[str, object]:
    """One template with its builds, by id or name."""
    template = await context.orchestrator.template(template_in_path(template_id))
    return {**template_view(template), "builds": [build_view(build) for build in template.builds]}
