"""The log of a sandbox's life on this node (contract section 2.3), both generations of paths."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from agentenv.api.context import Context
from agentenv.api.request_parts import SandboxId
from agentenv.api.views import LogEntryView, log_entry_view, log_line_view
from agentenv.core.model import LogEntry

router = APIRouter()
_MAX_RETURNED = 1000
_MAX_SEARCHED = 10_000  # entries looked through for one reply; a life makes a few dozen
_LEVELS = ("debug", "info", "warn", "error")

Level = Literal["debug", "info", "warn", "error"]
LogLimit = Annotated[int, Query(ge=0, le=_MAX_RETURNED)]
EpochMs = Annotated[int | None, Query(ge=0, lt=2**53)]


@router.get("/sandboxes/{sandbox_id}/logs", response_model=None)
async def logs(context: Context, sandbox_id: SandboxId, start: EpochMs = None, limit: LogLimit = _MAX_RETURNED) -> dict[str, object]:
    """Entries from `start` (milliseconds) on, oldest first, as JSON lines and structured."""
    entries = (await context.orchestrator.logs(sandbox_id, start or 0, limit))[:limit]
    return {"logs": [log_line_view(entry) for entry in entries], "logEntries": [log_entry_view(entry) for entry in entries]}


@router.get("/v2/sandboxes/{sandbox_id}/logs", response_model=None)
async def logs_v2(
    context: Context,
    sandbox_id: SandboxId,
    cursor: EpochMs = None,
    limit: LogLimit = _MAX_RETURNED,
    direction: Annotated[Literal["forward", "backward"], Query()] = "forward",
    level: Annotated[Level | None, Query()] = None,
    search: Annotated[str, Query()] = "",
) -> dict[str, list[LogEntryView]]:
    """Entries from `cursor` (milliseconds) on, or back from it; at least `level`; whose message holds `search`."""
    forward = direction == "forward"
    start_ms = (cursor or 0) if forward else 0
    entries = await context.orchestrator.logs(sandbox_id, start_ms, _MAX_SEARCHED)
    if not forward:
        entries = [entry for entry in reversed(entries) if cursor is None or entry.timestamp_ms <= cursor]
    return {"logs": [log_entry_view(entry) for entry in entries if _matches(entry, level, search)][:limit]}


def _matches(entry: LogEntry, level: Level | None, search: str) -> bool:
    if level is not None and _LEVELS.index(entry.level) < _LEVELS.index(level):
        return False
    return search in entry.message
