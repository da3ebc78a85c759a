"""Checkpoints of a sandbox, and going back to one in place. An extension: no E2B client asks for it by itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from agentenv.api.context import Context
from agentenv.api.models import CheckpointBody, RollbackBody
from agentenv.api.request_parts import SandboxId, json_body
from agentenv.api.views import CheckpointView, SandboxView, checkpoint_view, sandbox_view

router = APIRouter()


@router.post("/sandboxes/{sandbox_id}/checkpoints", status_code=201, response_model=None)
async def create(
    context: Context, sandbox_id: SandboxId, body: Annotated[CheckpointBody, Depends(json_body(CheckpointBody))]
) -> CheckpointView:
    """Keep this instant of a running or paused sandbox, or its disk alone; it goes on. 409 when the name is taken."""
    kept = await context.orchestrator.checkpoint(sandbox_id, body.name or "", body.memory)
    if body.durable:
        await context.orchestrator.write_out()
    return checkpoint_view(kept, is_current=True)


@router.get("/sandboxes/{sandbox_id}/checkpoints", response_model=None)
async def list_all(context: Context, sandbox_id: SandboxId) -> list[CheckpointView]:
    """Its checkpoints, oldest first; `parentID` makes a tree of them."""
    found = await context.orchestrator.checkpoints(sandbox_id)
    current = (await context.orchestrator.get(sandbox_id)).checkpoint_id
    return [checkpoint_view(checkpoint, checkpoint.checkpoint_id == current) for checkpoint in found]


@router.delete("/sandboxes/{sandbox_id}/checkpoints/{checkpoint}", status_code=204)
async def delete(context: Context, sandbox_id: SandboxId, checkpoint: str) -> Response:
    """Forget the checkpoint of that id or name. Those that descend from it stay, below its parent."""
    await context.orchestrator.remove_checkpoint(sandbox_id, checkpoint)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/rollback", response_model=None)
async def rollback(context: Context, sandbox_id: SandboxId, body: Annotated[RollbackBody, Depends(json_body(RollbackBody))]) -> SandboxView:
    """Make it what it was at a checkpoint: same id, address and tokens. Open connections end; a paused one stays paused."""
    back = await context.orchestrator.rollback(sandbox_id, body.checkpoint_id or "")
    return sandbox_view(back, context.settings.domain)
