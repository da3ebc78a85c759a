"""Snapshots of sandboxes (contract section 2.4). One is deleted as the template it is: `DELETE /templates/{snapshotID}`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from agentenv.api.context import Context
from agentenv.api.models import SnapshotBody
from agentenv.api.pagination import MAX_LIMIT, Limit, NextToken, cut_page, page_of
from agentenv.api.request_parts import SandboxId, json_body
from agentenv.api.views import SnapshotView, snapshot_view
from agentenv.core.errors import NotFound
from agentenv.core.model import Tag, Template
from agentenv.core.references import Reference, parse_reference
from agentenv.core.templates import build_of

router = APIRouter()


@router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201, response_model=None)
async def create(context: Context, sandbox_id: SandboxId, body: Annotated[SnapshotBody, Depends(json_body(SnapshotBody))]) -> SnapshotView:
    """Keep this instant of a running or paused sandbox, or its disk alone; it goes on. A name there is already gets one more build."""
    template, tag = await context.orchestrator.snapshot(sandbox_id, body.name, body.memory)
    if body.durable:
        await context.orchestrator.write_out()
    return snapshot_view(template, tag)


@router.get("/snapshots", response_model=None)
async def list_page(
    context: Context,
    response: Response,
    sandbox_id: Annotated[str | None, Query(alias="sandboxID")] = None,
    name: Annotated[str | None, Query()] = None,
    limit: Limit = MAX_LIMIT,
    next_token: NextToken = None,
) -> list[SnapshotView]:
    """A page of snapshots, newest first; `sandboxID` is the sandbox they were taken of. `x-next-token` is absent on the last page."""
    page = page_of(limit, next_token, None)
    found = [(t, tag) for t in await context.orchestrator.templates() if t.kind == "snapshot" for tag in t.tags]
    if sandbox_id:
        bare = sandbox_id.partition("-")[0]
        found = [(t, tag) for t, tag in found if build_of(t, tag.tag).sandbox_id == bare]
    if name:
        wanted = _wanted(name)
        found = [(t, tag) for t, tag in found if _is_called(t, tag, wanted)]
    return [snapshot_view(t, tag.tag) for t, tag in cut_page(found, _position, page, response)]


def _wanted(name: str) -> Reference | None:
    try:
        return parse_reference(name, "name")
    except NotFound:
        return None  # of another namespace: nothing here is called that


def _is_called(template: Template, tag: Tag, wanted: Reference | None) -> bool:
    if wanted is None or wanted.name not in (*template.aliases, template.template_id):
        return False
    return wanted.tag in (None, tag.tag)


def _position(item: tuple[Template, Tag]) -> tuple[int, str]:
    template, tag = item
    return tag.assigned_at_ms, f"{tag.tag}:{template.template_id}"
