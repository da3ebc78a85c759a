"""`GET /health`: whether the server answers. The only route without a key."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()


@router.get("/health", response_model=None)
async def health() -> dict[str, str]:
    """200 while the API is up; it says nothing about sandboxes."""
    return {"status": "ok"}
