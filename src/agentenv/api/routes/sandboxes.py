"""Creating, reading and listing sandboxes (contract sections 2.2 and 2.3), both generations of paths."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from starlette.responses import Response

from agentenv.api.auth import Caller, require_key
from agentenv.api.context import ApiContext, Context
from agentenv.api.idempotency import Reply
from agentenv.api.metadata_query import parse_metadata_filter
from agentenv.api.models import CreateBody, CreateBodyV1, to_create_request
from agentenv.api.pagination import MAX_LIMIT, NEXT_TOKEN_HEADER, TOTAL_RUNNING_HEADER, Limit, NextToken, Order, encode_token, page_of
from agentenv.api.request_parts import SandboxId, json_body, sandbox_not_found, template_in_body
from agentenv.api.timestamps import parse_rfc3339_us
from agentenv.api.views import (
    ListedSandboxView,
    PausedSandboxDetailView,
    SandboxDetailView,
    listed_sandbox_view,
    outcome_view,
    sandbox_detail_view,
    sandbox_view,
)
from agentenv.core.errors import InvalidInput, NotFound
from agentenv.core.lifecycle import VISIBLE
from agentenv.core.model import CreateRequest, Creation, Page, Sandbox, SandboxFilter, StartOutcome
from agentenv.core.references import parse_reference

router = APIRouter()
_MAX_LISTED = 10_000  # the most sandboxes that a node may run
_RUNNING = frozenset({"running"})
_STATES = frozenset(VISIBLE.values())
_UNFINISHED = StartOutcome(None, 503, "the server was restarted before this one had started; ask for it with a new Idempotency-Key")

IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key")]
CallerName = Annotated[Caller, Depends(require_key)]
Metadata = Annotated[str, Query()]


@router.post("/v2/sandboxes", status_code=201, response_model=None)
async def create(
    context: Context, caller: CallerName, body: Annotated[CreateBody, Depends(json_body(CreateBody))], key: IdempotencyKey = None
) -> Reply:
    """Start a sandbox; returns once commands can run in it. With `count` (an extension) a list, each entry with an outcome of its own."""
    return await _create(context, caller, body, key)


@router.post("/sandboxes", status_code=201, response_model=None)
async def create_v1(
    context: Context, caller: CallerName, body: Annotated[CreateBodyV1, Depends(json_body(CreateBodyV1))], key: IdempotencyKey = None
) -> Reply:
    """The older create; only the default timeout differs."""
    return await _create(context, caller, body, key)


@router.get("/sandboxes/{sandbox_id}", response_model=None)
async def read(context: Context, sandbox_id: SandboxId) -> SandboxDetailView | PausedSandboxDetailView:
    """One sandbox, running or paused."""
    sandbox = await context.orchestrator.get(sandbox_id)
    if sandbox.state not in VISIBLE:
        raise sandbox_not_found(sandbox_id)
    return sandbox_detail_view(sandbox, context.settings.domain)


@router.get("/v2/sandboxes", response_model=None)
async def search(
    context: Context,
    response: Response,
    metadata: Metadata = "",
    state: Annotated[list[str] | None, Query()] = None,
    order: Annotated[Order | None, Query()] = None,
    started_after: Annotated[str | None, Query(alias="startedAfter")] = None,
    template: Annotated[str | None, Query()] = None,
    limit: Limit = MAX_LIMIT,
    next_token: NextToken = None,
) -> list[ListedSandboxView]:
    """A page of sandboxes; `x-next-token` is absent on the last one."""
    wanted = SandboxFilter(
        states=_parse_states(state),
        metadata=parse_metadata_filter(metadata),
        template=_parse_template_filter(template),
        started_after_ms=_parse_started_after(started_after),
    )
    page = page_of(limit, next_token, order)
    found, position = await context.orchestrator.search(wanted, page)
    if position is not None:
        response.headers[NEXT_TOKEN_HEADER] = encode_token(position, ascending=page.ascending)
    response.headers[TOTAL_RUNNING_HEADER] = str(await context.orchestrator.count(replace(wanted, states=_RUNNING)))
    return _listed(found)


@router.get("/sandboxes", response_model=None)
async def list_running(context: Context, response: Response, metadata: Metadata = "") -> list[ListedSandboxView]:
    """The oldest list: all that run, in one reply."""
    wanted = SandboxFilter(states=_RUNNING, metadata=parse_metadata_filter(metadata))
    running, _ = await context.orchestrator.search(wanted, Page(limit=_MAX_LISTED))
    response.headers[TOTAL_RUNNING_HEADER] = str(len(running))
    return _listed(running)


async def _create(context: ApiContext, caller: Caller, body: CreateBody, key: str | None) -> Reply:
    request = to_create_request(body, template_in_body(body.template_id), context.settings.max_timeout_hours)
    fingerprint = _fingerprint(request, body.count)
    if body.count is not None:
        return await _create_many(context, caller, request, body.count, key, fingerprint)
    creation = None if key is None else Creation(f"{caller}:{key}", fingerprint)

    async def work() -> Reply:
        sandbox = await context.orchestrator.create(replace(request, creation=creation))
        return dict(sandbox_view(sandbox, context.settings.domain))

    async def recall() -> tuple[str, Reply] | None:
        sandbox = await context.orchestrator.created_by(creation.key) if creation is not None else None
        if sandbox is None or sandbox.creation is None:
            return None
        return sandbox.creation.fingerprint, dict(sandbox_view(sandbox, context.settings.domain))

    return await context.creations.once(caller, key, fingerprint, work, recall)


async def _create_many(context: ApiContext, caller: Caller, request: CreateRequest, count: int, key: str | None, fingerprint: str) -> Reply:
    creations = [None if key is None else Creation(f"{caller}:{key}/{number}", fingerprint) for number in range(count)]

    async def work() -> Reply:
        outcomes = await context.orchestrator.create_many([replace(request, creation=creation) for creation in creations])
        return [outcome_view(outcome, context.settings.domain) for outcome in outcomes]

    async def recall() -> tuple[str, Reply] | None:
        made = [await context.orchestrator.created_by(creation.key) if creation is not None else None for creation in creations]
        fingerprints = {sandbox.creation.fingerprint for sandbox in made if sandbox is not None and sandbox.creation is not None}
        if not fingerprints:
            return None
        outcomes = [StartOutcome(sandbox) if sandbox is not None else _UNFINISHED for sandbox in made]
        return min(fingerprints), [outcome_view(outcome, context.settings.domain) for outcome in outcomes]

    return await context.creations.once(caller, key, fingerprint, work, recall)


def _fingerprint(request: CreateRequest, count: int | None) -> str:
    return hashlib.sha256(json.dumps([asdict(request), count], sort_keys=True).encode()).hexdigest()


def _listed(sandboxes: list[Sandbox]) -> list[ListedSandboxView]:
    return [listed_sandbox_view(sandbox) for sandbox in sandboxes if sandbox.state in VISIBLE]


def _parse_states(given: list[str] | None) -> frozenset[str]:
    states = frozenset(name for part in given or () for name in part.split(",") if name)
    if unknown := states - _STATES:
        raise InvalidInput(f"state: {min(unknown)[:80]!r} is not a state", "use running, paused, or both joined by a comma")
    return states or _STATES


def _parse_template_filter(given: str | None) -> str | None:
    if not given:
        return None
    try:
        reference = parse_reference(given, "template")
    except NotFound:
        return given  # of another namespace: no sandbox has such a template
    if reference.tag is not None:
        raise InvalidInput("template: a name with a tag cannot be a filter", "leave out the part from the colon on")
    return reference.name


def _parse_started_after(given: str | None) -> int | None:
    if not given:
        return None
    try:
        # Start times are whole milliseconds: the first one not before `given` keeps the comparison inclusive.
        return -(-parse_rfc3339_us(given) // 1000)
    except ValueError as error:
        raise InvalidInput(f"startedAfter: {error}", "for example 2026-01-31T12:00:00Z") from error
