"""What sandboxes use: CPU, memory and disk over time (contract section 2.3)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse

from agentenv.api.context import Context
from agentenv.api.request_parts import SandboxId
from agentenv.api.views import metric_view
from agentenv.core.errors import InvalidInput

router = APIRouter()
_MAX_IDS = 100  # contract section 2.3
_EpochS = Annotated[int | None, Query(ge=0, lt=2**40)]  # the year 36,000


@router.get("/sandboxes/metrics", response_model=None)
async def latest(context: Context, sandbox_ids: Annotated[list[str], Query()]) -> JSONResponse:
    """The newest sample of each of `sandbox_ids` (joined by commas); ids that have none, or do not exist, are left out."""
    wanted = {name.partition("-")[0] for part in sandbox_ids for name in part.split(",") if name}
    if len(wanted) > _MAX_IDS:
        raise InvalidInput(f"sandbox_ids: {len(wanted)} ids are more than {_MAX_IDS}", "ask for them in several calls")
    found = await context.orchestrator.latest_metrics(wanted)
    return JSONResponse({"sandboxes": {sandbox_id: metric_view(sample) for sandbox_id, sample in found.items()}})


@router.get("/sandboxes/{sandbox_id}/metrics", response_model=None)
async def history(context: Context, sandbox_id: SandboxId, start: _EpochS = None, end: _EpochS = None) -> JSONResponse:
    """The samples from second `start` to second `end`, both included, oldest first; without them the whole life.

    Also of a paused sandbox, and of one that has ended, as long as the node remembers it.
    """
    if start is not None and end is not None and start > end:
        raise InvalidInput(f"start: {start} is after end {end}", "both are unix seconds")
    samples = await context.orchestrator.metrics(sandbox_id, 1000 * (start or 0), None if end is None else 1000 * end + 999)
    # Not through the framework's encoder: thousands of samples would hold up the event loop for 50 ms.
    return JSONResponse([metric_view(sample) for sample in samples])
