"""Template builds (contract section 2.7): ask for one, upload its files, start it, follow it.

Files are uploaded to a URL of this node that carries its own ticket instead of a key, as presigned URLs do.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import quote, unquote

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from agentenv.api.build_models import NewBuildBody, NewBuildBodyV2, StartBuildBody, to_plan
from agentenv.api.context import Context
from agentenv.api.pagination import MAX_LIMIT
from agentenv.api.request_parts import body_chunks, json_body, template_in_path
from agentenv.api.views import (
    BuildLogsView,
    BuildStatusView,
    BuildView,
    RequestedBuildView,
    TemplateView,
    UploadView,
    build_job_view,
    build_log_view,
    build_status_view,
    requested_build_view,
    requested_template_view,
)
from agentenv.core.builds import BuildJob, MachineSize
from agentenv.core.errors import InvalidInput
from agentenv.core.model import LogLevel, Machine, Template
from agentenv.template.build_log import BuildEntry, at_least

router = APIRouter()
uploads = APIRouter()
UPLOAD_PATH = "/template-files"
InPath = Annotated[str, Path()]
Level = Annotated[LogLevel, Query()]
EntryLimit = Annotated[int, Query(ge=0, le=MAX_LIMIT)]


@router.post("/v3/templates", status_code=202, response_model=None)
async def request(context: Context, body: Annotated[NewBuildBody, Depends(json_body(NewBuildBody))]) -> RequestedBuildView:
    """A new build of the template of that name, which need not exist yet; `start` begins it."""
    job = await context.orchestrator.builds.request(body.wanted_name(), body.tags, body.size())
    return requested_build_view(job, await _template(context, job))


@router.post("/v2/templates", status_code=202, response_model=None)
async def request_v2(context: Context, body: Annotated[NewBuildBodyV2, Depends(json_body(NewBuildBodyV2))]) -> TemplateView:
    """The older request: it names an alias and is answered with a template."""
    job = await context.orchestrator.builds.request(body.alias, (), MachineSize(body.cpu_count, body.memory_mb))
    return requested_template_view(job, Machine(body.cpu_count or 0, body.memory_mb or 0, 0), await _template(context, job))


@router.get("/templates/{template_id}/files/{files_hash}", status_code=201, response_model=None)
async def file(request: Request, context: Context, template_id: InPath, files_hash: InPath) -> UploadView:
    """Whether the files of that hash are here already, and where to upload them (also anew) if not."""
    template_in_path(template_id)
    wanted = unquote(files_hash)
    files = context.orchestrator.builds.files
    is_present, ticket = files.has(wanted), files.ticket(wanted)
    return {"present": is_present, "url": f"{_own_url(request)}{UPLOAD_PATH}/{quote(wanted)}?ticket={ticket}"}


@uploads.put(UPLOAD_PATH + "/{files_hash}")
async def upload(request: Request, context: Context, files_hash: InPath, ticket: Annotated[str, Query()] = "") -> Response:
    """Store an archive (tar, or tar compressed) under the hash of its files. The ticket comes with the URL."""
    declared = request.headers.get("content-length", "")
    size_bytes = int(declared) if declared.isdecimal() else None
    await context.orchestrator.builds.files.receive(unquote(files_hash), ticket, size_bytes, body_chunks(request))
    return Response(status_code=200)


@router.post("/v2/templates/{template_id}/builds/{build_id}", status_code=202)
async def start(
    context: Context, template_id: InPath, build_id: InPath, body: Annotated[StartBuildBody, Depends(json_body(StartBuildBody))]
) -> Response:
    """Begin a build that was requested. It goes on when its caller leaves."""
    await context.orchestrator.builds.start(template_in_path(template_id), unquote(build_id), to_plan(body))
    return Response(status_code=202)


@router.get("/builds", response_model=None)
async def recent(context: Context, limit: EntryLimit = MAX_LIMIT) -> list[BuildView]:
    """The builds requested last, of all templates; an extension."""
    return [build_job_view(job) for job in context.orchestrator.builds.recent(limit)]


@router.get("/templates/{template_id}/builds/{build_id}/status", response_model=None)
async def status(
    context: Context,
    template_id: InPath,
    build_id: InPath,
    logs_offset: Annotated[int, Query(alias="logsOffset", ge=0)] = 0,
    limit: EntryLimit = MAX_LIMIT,
    level: Level = "debug",
) -> BuildStatusView:
    """How far a build is, and what it said after the first `logsOffset` entries of at least that level."""
    builds = context.orchestrator.builds
    report = await builds.report(template_in_path(template_id), unquote(build_id), logs_offset, limit, level)
    return build_status_view(report)


@router.get("/templates/{template_id}/builds/{build_id}/logs", response_model=None)
async def logs(
    context: Context,
    template_id: InPath,
    build_id: InPath,
    cursor: Annotated[int | None, Query(ge=0)] = None,
    limit: EntryLimit = MAX_LIMIT,
    direction: Literal["forward", "backward"] = "forward",
    level: Level = "debug",
    source: Literal["temporary", "persistent"] | None = None,
) -> BuildLogsView:
    """What a build said from (or back from) `cursor`, a time in milliseconds, both included. `source` makes no difference here."""
    builds = context.orchestrator.builds
    job = builds.job(template_in_path(template_id), unquote(build_id))
    entries = at_least(await builds.entries(job), level)
    return {"logs": [build_log_view(entry) for entry in _part(entries, cursor, direction, limit)]}


def _part(entries: list[BuildEntry], cursor_ms: int | None, direction: str, limit: int) -> list[BuildEntry]:
    if direction == "forward":
        return [entry for entry in entries if cursor_ms is None or entry.timestamp_ms >= cursor_ms][:limit]
    return [entry for entry in reversed(entries) if cursor_ms is None or entry.timestamp_ms <= cursor_ms][:limit]


async def _template(context: Context, job: BuildJob) -> Template | None:
    """The template that the build belongs to, if an earlier build of it has ended well."""
    return next((t for t in await context.orchestrator.templates() if t.template_id == job.template_id), None)


def _own_url(request: Request) -> str:
    """Where the caller reaches this API: by the host and the scheme of its own request."""
    proto = request.headers.get("x-forwarded-proto", "").strip()
    host = request.headers.get("host", "").strip()
    if not host:
        raise InvalidInput("the request has no Host header", "send one: the upload's URL is made from it")
    return f"{proto if proto in ('http', 'https') else request.url.scheme}://{host}"
