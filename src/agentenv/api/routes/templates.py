"""Templates: what sandboxes are created from (contract section 2.7). Snapshots of sandboxes have their own list, see `snapshots`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path
from starlette.responses import Response

from agentenv.api.context import Context
from agentenv.api.models import UpdateTemplateBody
from agentenv.api.pagination import MAX_LIMIT, Limit, NextToken, cut_page, page_of
from agentenv.api.request_parts import json_body, template_in_path
from agentenv.api.views import TemplateView, build_view, template_names, template_view
from agentenv.core.errors import NotFound
from agentenv.core.model import Template

router = APIRouter()

TemplateInPath = Annotated[str, Path()]
Update = Annotated[UpdateTemplateBody, Depends(json_body(UpdateTemplateBody))]


@router.get("/templates", response_model=None)
async def list_all(context: Context) -> list[TemplateView]:
    """All templates, newest first. `teamID` is ignored: a node is one team."""
    return [template_view(template) for template in await _listed(context)]


@router.get("/v2/templates", response_model=None)
async def list_page(context: Context, response: Response, limit: Limit = MAX_LIMIT, next_token: NextToken = None) -> list[TemplateView]:
    """A page of templates, newest first; `x-next-token` is absent on the last one."""
    page = page_of(limit, next_token, None)
    part = cut_page(await _listed(context), lambda template: (template.created_at_ms, template.template_id), page, response)
    return [template_view(template) for template in part]


@router.get("/default-templates", response_model=None)
async def list_defaults(context: Context) -> list[TemplateView]:
    """The templates that the node itself brings."""
    return [template_view(template) for template in await _listed(context) if template.kind == "builtin"]


@router.get("/templates/aliases/{alias}", response_model=None)
async def read_alias(context: Context, alias: TemplateInPath) -> dict[str, object]:
    """Which template a name stands for; 404 when none."""
    template = await context.orchestrator.template(template_in_path(alias))
    return {"templateID": template.template_id, "public": template.public}


@router.get("/templates/{template_id}", response_model=None)
async def read(
    context: Context, response: Response, template_id: TemplateInPath, limit: Limit = MAX_LIMIT, next_token: NextToken = None
) -> dict[str, object]:
    """One template, also a snapshot, by id or name, with a page of its builds, newest first."""
    page = page_of(limit, next_token, None)
    template = await context.orchestrator.template(template_in_path(template_id))
    part = cut_page(template.builds, lambda build: (build.created_at_ms, build.build_id), page, response)
    return {**template_view(template), "builds": [build_view(build) for build in part]}


@router.patch("/v2/templates/{template_id}", response_model=None)
async def update(context: Context, template_id: TemplateInPath, body: Update) -> dict[str, list[str]]:
    """Say whether a template is for everyone. All holders of a key of this node may use it either way."""
    return {"names": template_names(await _update(context, template_id, body))}


@router.patch("/templates/{template_id}", response_model=None)
async def update_v1(context: Context, template_id: TemplateInPath, body: Update) -> dict[str, object]:
    """The older update; its answer says nothing."""
    await _update(context, template_id, body)
    return {}


@router.delete("/templates/{template_id}", status_code=204)
async def delete(context: Context, template_id: TemplateInPath) -> Response:
    """Remove a template or snapshot, and end its builds; with a tag, only that tag and its build. 400 while sandboxes use it."""
    reference = template_in_path(template_id)
    unfinished = context.orchestrator.builds.unfinished(reference)
    try:
        await context.orchestrator.delete_template(reference)
    except NotFound:
        if not unfinished:
            raise
    await context.orchestrator.builds.give_up(unfinished, "the template was deleted while the build was under way")
    return Response(status_code=204)


async def _listed(context: Context) -> list[Template]:
    return [template for template in await context.orchestrator.templates() if template.kind != "snapshot"]


async def _update(context: Context, segment: str, body: UpdateTemplateBody) -> Template:
    reference = template_in_path(segment)
    if body.public is None:
        return await context.orchestrator.template(reference)
    return await context.orchestrator.set_public(reference, body.public)
