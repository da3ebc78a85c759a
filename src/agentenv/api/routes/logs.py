"""The log of a sandbox's life on this node (contract section 2.3), both generations of paths."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from agentenv.api.context import Context
from agentenv.api.request_parts import SandboxId
from agentenv.api.views import LogEntryView, log_entry_view, log_line_view
from agentenv.core.model import LogLevel, LogQuery

router = APIRouter()
_MAX_RETURNED = 1000
_MAX_SEARCH_CHARS = 1000

LogLimit = Annotated[int, Query(ge=0, le=_MAX_RETURNED)]
EpochMs = Annotated[int | None, Query(ge=0, lt=2**53)]


@router.get("/sandboxes/{sandbox_id}/logs", response_model=None)
async def logs(context: Context, sandbox_id: SandboxId, start: EpochMs = None, limit: LogLimit = _MAX_RETURNED) -> dict[str, object]:
    """Entries from `start` (milliseconds) on, oldest first, as JSON lines and structured."""
    entries = await context.orchestrator.logs(sandbox_id, LogQuery(cursor_ms=start, limit=limit))
    return {"logs": [log_line_view(entry) for entry in entries], "logEntries": [log_entry_view(entry) for entry in entries]}


@router.get("/v2/sandboxes/{sandbox_id}/logs", response_model=None)
async def logs_v2(
    context: Context,
    sandbox_id: SandboxId,
    cursor: EpochMs = None,
    limit: LogLimit = _MAX_RETURNED,
    direction: Annotated[Literal["forward", "backward"], Query()] = "forward",
    level: Annotated[LogLevel, Query()] = "debug",
    search: Annotated[str, Query(max_length=_MAX_SEARCH_CHARS)] = "",
) -> dict[str, list[LogEntryView]]:
    """Entries from `cursor` (milliseconds) on, or back from it (without one: from the newest); at least `level`; holding `search`."""
    entries = await context.orchestrator.logs(sandbox_id, LogQuery(cursor, direction == "backward", level, search, limit))
    return {"logs": [log_entry_view(entry) for entry in entries]}
