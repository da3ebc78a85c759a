"""Changing the life of a sandbox (contract section 2.4), both generations of paths."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from agentenv.api.context import ApiContext, Context
from agentenv.api.models import (
    ConnectBody,
    ConnectBodyV1,
    ForkBody,
    PauseBody,
    RefreshBody,
    ResumeBody,
    TimeoutBody,
    check_timeout,
)
from agentenv.api.network_models import NetworkUpdateBody, to_settings
from agentenv.api.request_parts import SandboxId, json_body
from agentenv.api.views import SandboxView, outcome_view, sandbox_view
from agentenv.core.lifecycle import VISIBLE
from agentenv.core.model import OnTimeout

router = APIRouter()
_SHORTEST_REFRESH_S = 15  # contract section 2.4
_DEFAULT_CONNECT_S = 300  # contract section 2.4
_RUNS: dict[int | str, dict[str, Any]] = {
    200: {"model": SandboxView, "description": "It ran already."},
    201: {"model": SandboxView, "description": "It was paused and runs again."},
}


@router.delete("/sandboxes/{sandbox_id}", status_code=204)
async def kill(context: Context, sandbox_id: SandboxId) -> Response:
    """End it, running or paused; 404 the second time."""
    await context.orchestrator.kill(sandbox_id)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/pause", status_code=204)
async def pause(context: Context, sandbox_id: SandboxId, body: Annotated[PauseBody, Depends(json_body(PauseBody))]) -> Response:
    """Save memory and disk, or the disk alone, and free the rest; 409 when paused already, 503 when the guest must answer and does not."""
    await context.orchestrator.pause(sandbox_id, body.memory, body.require_healthy_guest)
    if body.durable:
        await context.orchestrator.write_out()
    return Response(status_code=204)


@router.post("/v2/sandboxes/{sandbox_id}/connect", response_model=None, responses=_RUNS)
async def connect(context: Context, sandbox_id: SandboxId, body: Annotated[ConnectBody, Depends(json_body(ConnectBody))]) -> JSONResponse:
    """Make it run and last at least the timeout: 200 when it ran, 201 when it was resumed."""
    timeout_s = body.timeout_s
    if timeout_s is None:
        sandbox = await context.orchestrator.get(sandbox_id)
        timeout_s = max(_DEFAULT_CONNECT_S, sandbox.timeout_s if VISIBLE.get(sandbox.state) == "paused" else 0)
    return await _connect(context, sandbox_id, timeout_s, body.memory)


@router.post("/sandboxes/{sandbox_id}/connect", response_model=None, responses=_RUNS)
async def connect_v1(
    context: Context, sandbox_id: SandboxId, body: Annotated[ConnectBodyV1, Depends(json_body(ConnectBodyV1))]
) -> JSONResponse:
    """The older connect; its timeout is required."""
    return await _connect(context, sandbox_id, body.timeout_s, body.memory)


@router.post("/sandboxes/{sandbox_id}/resume", status_code=201, response_model=None)
async def resume(context: Context, sandbox_id: SandboxId, body: Annotated[ResumeBody, Depends(json_body(ResumeBody))]) -> SandboxView:
    """The oldest way to wake a paused sandbox; 409 when it runs. Without `autoPause` its policy at the timeout stays what it was."""
    timeout_s = check_timeout(body.timeout_s, context.settings.max_timeout_hours)
    on_timeout: OnTimeout | None = None if body.auto_pause is None else "pause" if body.auto_pause else "kill"
    sandbox = await context.orchestrator.resume(sandbox_id, timeout_s, body.memory, on_timeout)
    return sandbox_view(sandbox, context.settings.domain)


@router.post("/sandboxes/{sandbox_id}/timeout", status_code=204)
async def set_timeout(context: Context, sandbox_id: SandboxId, body: Annotated[TimeoutBody, Depends(json_body(TimeoutBody))]) -> Response:
    """Expire that many seconds from now, sooner or later than before; 0 acts at once."""
    timeout_s = check_timeout(body.timeout_s, context.settings.max_timeout_hours, lowest_s=0)
    await context.orchestrator.set_timeout(sandbox_id, timeout_s)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/refreshes", status_code=204)
async def refresh(context: Context, sandbox_id: SandboxId, body: Annotated[RefreshBody, Depends(json_body(RefreshBody))]) -> Response:
    """Extend the life, never shorten it."""
    await context.orchestrator.refresh(sandbox_id, max(body.duration_s, _SHORTEST_REFRESH_S))
    return Response(status_code=204)


@router.put("/sandboxes/{sandbox_id}/network", status_code=204)
async def set_network(
    context: Context, sandbox_id: SandboxId, body: Annotated[NetworkUpdateBody, Depends(json_body(NetworkUpdateBody))]
) -> Response:
    """Replace the network settings of a running sandbox; what the body leaves out is cleared."""
    await context.orchestrator.set_network(sandbox_id, to_settings(body), body.allow_internet_access)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/fork", status_code=201, response_model=None)
async def fork(context: Context, sandbox_id: SandboxId, body: Annotated[ForkBody, Depends(json_body(ForkBody))]) -> list[dict[str, object]]:
    """Copies that go on from this instant; each child has its own outcome."""
    timeout_s = check_timeout(body.timeout_s, context.settings.max_timeout_hours)
    outcomes = await context.orchestrator.fork(sandbox_id, body.count, timeout_s)
    return [outcome_view(outcome, context.settings.domain) for outcome in outcomes]


async def _connect(context: ApiContext, sandbox_id: str, given_timeout_s: int, memory: bool) -> JSONResponse:
    timeout_s = check_timeout(given_timeout_s, context.settings.max_timeout_hours)
    sandbox, resumed = await context.orchestrator.connect(sandbox_id, timeout_s, memory)
    return JSONResponse(sandbox_view(sandbox, context.settings.domain), status_code=201 if resumed else 200)
