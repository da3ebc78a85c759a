"""Tags of templates (contract section 2.7): which build a name stands for, now and before."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import Response

from agentenv.api.context import Context
from agentenv.api.models import AssignTagsBody, RemoveTagsBody
from agentenv.api.pagination import MAX_LIMIT, decode_token, encode_token, make_position, parse_position
from agentenv.api.request_parts import json_body, tag_in_path, template_in_path
from agentenv.api.views import AssignmentView, TagView, assignment_view, tag_view
from agentenv.core.errors import InvalidInput, NotFound
from agentenv.core.model import Tag, Template
from agentenv.core.references import check_tag, parse_new_name, parse_reference

router = APIRouter()
InPath = Annotated[str, Path()]
Cursor = Annotated[str | None, Query()]
Sort = Literal["latest_asc", "latest_desc", "name_asc", "name_desc"]
_TAG_END = "/"  # closes a tag in a cursor: no tag holds it, so none can look like the end of a token


@router.post("/templates/tags", status_code=201, response_model=None)
async def assign(context: Context, body: Annotated[AssignTagsBody, Depends(json_body(AssignTagsBody))]) -> dict[str, object]:
    """Give tags to the build that `target` names. A tag may also come as `name:tag` of the same template."""
    target = str(parse_reference(body.target, "target"))
    template = await context.orchestrator.template(target)
    tags = tuple(dict.fromkeys(_plain_tag(tag, template) for tag in body.tags))
    build = await context.orchestrator.assign_tags(target, tags)
    return {"tags": tags, "buildID": build.build_id}


@router.delete("/templates/tags", status_code=204)
async def remove(context: Context, body: Annotated[RemoveTagsBody, Depends(json_body(RemoveTagsBody))]) -> Response:
    """Take tags off a template. A build goes with its last tag, and a template with its last build."""
    await context.orchestrator.remove_tags(body.name, [check_tag(tag) for tag in body.tags])
    return Response(status_code=204)


@router.get("/templates/{template_id}/tags", response_model=None)
async def list_all(context: Context, template_id: InPath) -> list[TagView]:
    """All tags, `default` first."""
    return [tag_view(tag) for tag in (await _template(context, template_id)).tags]


@router.get("/templates/{template_id}/tags/count", response_model=None)
async def count(context: Context, template_id: InPath) -> dict[str, int]:
    """How many tags there are."""
    return {"total": len((await _template(context, template_id)).tags)}


@router.get("/templates/{template_id}/tags/exists", response_model=None)
async def exists(context: Context, template_id: InPath, tag: Annotated[str, Query()]) -> dict[str, object]:
    """Whether there is such a tag, and how it is written."""
    wanted = check_tag(tag, "tag")
    return {"exists": wanted in [t.tag for t in (await _template(context, template_id)).tags], "normalizedTag": wanted}


@router.get("/templates/{template_id}/tags/groups", response_model=None)
async def groups(
    context: Context,
    template_id: InPath,
    assignment_limit: Annotated[int, Query(alias="assignmentLimit", ge=1, le=MAX_LIMIT)] = 6,
    tags_limit: Annotated[int, Query(alias="tagsLimit", ge=1, le=MAX_LIMIT)] = 25,
    tags_cursor: Annotated[str | None, Query(alias="tagsCursor")] = None,
    search: Annotated[str, Query(max_length=128)] = "",
    sort: Annotated[Sort, Query()] = "latest_desc",
) -> dict[str, object]:
    """Tags whose name holds `search`, each with its newest assignments."""
    template = await _template(context, template_id)
    by_name, is_descending = sort.startswith("name"), sort.endswith("desc")

    def key(at_ms: int, tag: str) -> tuple[int, str]:
        return (0, tag) if by_name else (at_ms, tag)

    wanted = [tag for tag in template.tags if search.strip().lower() in tag.tag]
    wanted.sort(key=lambda tag: key(tag.assigned_at_ms, tag.tag), reverse=is_descending)
    if tags_cursor:
        last = key(*_read_cursor(tags_cursor))
        keys = ((tag, key(tag.assigned_at_ms, tag.tag)) for tag in wanted)
        wanted = [tag for tag, at in keys if (at < last if is_descending else at > last)]
    part = wanted[:tags_limit]
    next_cursor = None
    if len(wanted) > len(part):
        next_cursor = encode_token(make_position(part[-1].assigned_at_ms, part[-1].tag + _TAG_END))
    return {"tags": [_group(template, tag, assignment_limit) for tag in part], "nextCursor": next_cursor}


@router.get("/templates/{template_id}/tags/{tag}/assignments", response_model=None)
async def assignments(
    context: Context, template_id: InPath, tag: InPath, cursor: Cursor = None, limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 50
) -> dict[str, object]:
    """Which builds a tag has named, the present one first. Assignments of long ago are forgotten."""
    template, wanted = await _template(context, template_id), tag_in_path(tag)
    events = _events(template, wanted)
    if not events:
        raise NotFound(f"template '{template.name}' has no tag '{wanted}'")
    if cursor:
        last, _ = decode_token(cursor)
        places = [place for place, event in enumerate(events) if event.assignment_id == last]
        events = events[places[0] + 1 :] if places else []  # an event that is forgotten was among the last
    part = events[:limit]
    more = len(events) > len(part)
    return {"data": _views(part), "nextCursor": encode_token(part[-1].assignment_id) if more else None}


async def _template(context: Context, segment: str) -> Template:
    return await context.orchestrator.template(template_in_path(segment))


def _plain_tag(text: str, target: Template) -> str:
    if ":" not in text:
        return check_tag(text)
    name = parse_new_name(text, "tags")
    if name.tag is None or (target.template_id != name.name and name.name not in target.aliases):
        raise InvalidInput(f"tags: {text[:80]!r} is not a tag of template '{target.name}'", "give the tag alone, without a name before it")
    return name.tag


def _events(template: Template, tag: str) -> list[Tag]:
    return [event for event in (*template.tags, *template.history) if event.tag == tag]


def _group(template: Template, tag: Tag, limit: int) -> dict[str, object]:
    events = _events(template, tag.tag)
    return {"tag": tag.tag, "assignments": _views(events[:limit]), "hasMore": len(events) > limit}


def _views(events: list[Tag]) -> list[AssignmentView]:
    return [assignment_view(event) for event in events]


def _read_cursor(cursor: str) -> tuple[int, str]:
    position, _ = decode_token(cursor)
    at_ms, tag = parse_position(position)
    return at_ms, tag.removesuffix(_TAG_END)
