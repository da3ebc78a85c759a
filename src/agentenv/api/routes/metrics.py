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
_EpochS = Annotated[int | None, Query(ge=0, lt=2**53)]
_MS_FROM = 10**11  # the year 5138 in seconds, 1973 in milliseconds: above it a moment is meant in milliseconds, as e2b up to 2.3 sends it


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
    start_ms = _in_ms(start or 0, 0)
    end_ms = None if end is None else _in_ms(end, 999)
    if end_ms is not None and start_ms > end_ms:
        raise InvalidInput(f"start: {start} is after end {end}", "both are unix seconds")
    samples = await context.orchestrator.metrics(sandbox_id, start_ms, end_ms)
    # Not through the framework's encoder: thousands of samples would hold up the event loop for 50 ms.
    return JSONResponse([metric_view(sample) for sample in samples])


def _in_ms(moment: int, rest_ms: int) -> int:
    """A moment of the query in milliseconds; one in seconds means its `rest_ms`, too."""
    return moment if moment >= _MS_FROM else 1000 * moment + rest_ms
