"""Files and folders in a volume (contract section 2.9): `/volumecontent/{id}/path`, `/dir` and `/file`.

The credential is the volume's token, not an API key. Bodies of files stream both ways through one buffer per request.
Errors here carry a text as `code` (see `api.errors`).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentenv.api.auth import bearer_token
from agentenv.api.context import Context
from agentenv.api.models import VolumeAttributesBody
from agentenv.api.request_parts import CHUNK_BYTES, body_chunks, json_body
from agentenv.api.views import entry_view
from agentenv.core.errors import Internal, InvalidInput, Unauthenticated
from agentenv.volume.tree import Attributes, Entry, Tree, Upload

router = APIRouter()
DEPTH_MAX = 64
_QUERY_FIELDS_MAX = 64  # the routes know five

T = TypeVar("T")
Flag = Annotated[bool | None, Query()]
Number = Annotated[int | None, Query()]


def _tree(context: Context, request: Request, volume_id: str) -> Tree:
    token = bearer_token(request)
    if not token:
        raise Unauthenticated("no volume token in the request", "send it as Authorization: Bearer, from Volume.create or Volume.connect")
    return context.orchestrator.volumes.content(volume_id, token)


def _path(request: Request, path: Annotated[str, Query(description="Where in the volume, from its root.")]) -> str:
    """The `path` of the query, byte for byte: names that guests give files need not be UTF-8, which `path` as parsed would be."""
    query = request.scope["query_string"].decode("latin-1")
    try:
        pairs: dict[str, str] = dict(parse_qsl(query, keep_blank_values=True, errors="surrogateescape", max_num_fields=_QUERY_FIELDS_MAX))
    except ValueError as error:
        raise InvalidInput(f"the query has more than {_QUERY_FIELDS_MAX} fields") from error
    return pairs.get("path", path)


def _attributes(uid: Number = None, gid: Number = None, mode: Number = None) -> Attributes:
    attributes = Attributes(uid, gid, mode)
    attributes.check()
    return attributes


VolumeTree = Annotated[Tree, Depends(_tree)]
PathInVolume = Annotated[str, Depends(_path)]
NewAttributes = Annotated[Attributes, Depends(_attributes)]
Json = Annotated[VolumeAttributesBody, Depends(json_body(VolumeAttributesBody))]


@router.get("/volumecontent/{volume_id}/path")
async def stat(tree: VolumeTree, path: PathInVolume) -> Response:
    """What is at a path; a link is itself."""
    return _reply(await _whole(tree.stat, path))


@router.patch("/volumecontent/{volume_id}/path")
async def update(tree: VolumeTree, path: PathInVolume, body: Json) -> Response:
    """Change owner and mode of what is there."""
    attributes = Attributes(body.uid, body.gid, body.mode)
    attributes.check()
    return _reply(await _whole(tree.update, path, attributes))


@router.delete("/volumecontent/{volume_id}/path", status_code=204)
async def remove(tree: VolumeTree, path: PathInVolume) -> Response:
    """Remove a file, or a folder with all it holds."""
    await _whole(tree.remove, path)
    return Response(status_code=204)


@router.get("/volumecontent/{volume_id}/dir")
async def list_folder(tree: VolumeTree, path: PathInVolume, depth: Annotated[int, Query(ge=0)] = 1) -> Response:
    """What is in a folder, and in its folders down to `depth`; 0 means 1."""
    if depth > DEPTH_MAX:
        raise InvalidInput(f"depth: must be 0 to {DEPTH_MAX}, not {depth}")
    return _reply(await _whole(tree.entries, path, max(depth, 1)))


@router.post("/volumecontent/{volume_id}/dir")
async def make_folder(tree: VolumeTree, path: PathInVolume, attributes: NewAttributes, force: Flag = None) -> Response:
    """A new folder; `force` makes its parents too, and does not mind when it exists."""
    return _reply(await _whole(tree.make_folder, path, attributes, bool(force)), 201)


@router.get("/volumecontent/{volume_id}/file")
async def read_file(tree: VolumeTree, path: PathInVolume) -> Response:
    """The bytes of a file, as many as it has now."""
    fd, size_bytes = await _whole(tree.open_file, path)
    headers = {"Content-Length": str(size_bytes)}
    return _FileResponse(fd, _chunks(fd, size_bytes, path), headers=headers, media_type="application/octet-stream")


@router.put("/volumecontent/{volume_id}/file")
async def write_file(request: Request, tree: VolumeTree, path: PathInVolume, attributes: NewAttributes, force: Flag = None) -> Response:
    """Write a file from the body. It appears when all of it is there; until then, and after a failure, the old one stands.

    An existing file is overwritten unless `force` is false; `force` true makes missing parents too.
    """
    upload = await _whole(tree.upload, path, attributes, force is not False, bool(force))
    try:
        await _receive(request, upload)
        return _reply(await _whole(upload.commit), 201)
    finally:
        upload.close()


class _FileResponse(StreamingResponse):
    """Closes its descriptor however the transfer ends, also when it never begins."""

    def __init__(self, fd: int, content: AsyncIterator[bytes], **settings: Any) -> None:
        super().__init__(content, **settings)
        self._fd = fd

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the file."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._fd)


async def _chunks(fd: int, size_bytes: int, path: str) -> AsyncIterator[bytes]:
    at = 0
    while at < size_bytes:
        chunk = await _whole(os.pread, fd, min(CHUNK_BYTES, size_bytes - at), at)
        if not chunk:
            raise Internal(f"path '{path}' became shorter while it was read")  # cuts the connection: the length was promised
        at += len(chunk)
        yield chunk


async def _receive(request: Request, upload: Upload) -> None:
    async for chunk in body_chunks(request):
        await _whole(upload.write, chunk)


async def _whole(work: Callable[..., T], *arguments: Any) -> T:
    """Run blocking work in a thread, to its end: what it uses is closed by the caller, who must not be earlier."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _reply(found: Entry | list[Entry], status: int = 200) -> Response:
    """JSON in ASCII: names may hold bytes that are no UTF-8."""
    body = [entry_view(entry) for entry in found] if isinstance(found, list) else entry_view(found)
    return Response(json.dumps(body), status, media_type="application/json")
