"""`GET /health`: whether the server answers, and what of the node does not work. The only route without a key."""

from __future__ import annotations

from fastapi import APIRouter

from agentenv.api.context import Context

router = APIRouter()


@router.get("/health", response_model=None)
async def health(context: Context) -> dict[str, object]:
    """200 while the API is up. `degraded` with `troubles`, by part of the node, while something is being mended."""
    if context.troubles:
        return {"status": "degraded", "troubles": dict(context.troubles)}
    return {"status": "ok"}
