"""Images of the node, and the layers they share with all else. Beside the contract: the E2B service has no such routes.

Pulling and importing take their time, so their replies are lines of JSON: how far it is, and in the end the image or the error.
A failure before the first such line is an ordinary error reply. The work goes on when its caller leaves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentenv.api.build_models import PullImageBody, PushImageBody, to_account
from agentenv.api.context import Context
from agentenv.api.errors import error_body, full_message
from agentenv.api.image_views import ImageView, LayerUseView, VerifiedView, image_view, layer_use_view, pushed_view, verified_view
from agentenv.api.request_parts import body_chunks, json_body, template_in_path
from agentenv.core.errors import AgentEnvError
from agentenv.host.command import Progress

T = TypeVar("T")
router = APIRouter()
InPath = Annotated[str, Path()]
_LINES_WAITING_MAX = 1000  # a caller that does not read misses some figures, never the end


@router.get("/images", response_model=None)
async def list_all(context: Context) -> list[ImageView]:
    """Every image, the one used last first."""
    return [image_view(image) for image in context.orchestrator.images.all()]


@router.get("/images/{reference}", response_model=None)
async def read(context: Context, reference: InPath) -> ImageView:
    """One image by its name (percent-encoded), its digest or the beginning of its digest."""
    return image_view(context.orchestrator.images.find(unquote(reference)))


@router.delete("/images/{reference}", status_code=204)
async def delete(context: Context, reference: InPath) -> Response:
    """Forget a name, and the image with its last one; by digest, all names. What else uses its layers keeps them."""
    await context.orchestrator.images.remove(unquote(reference))
    return Response(status_code=204)


@router.post("/images/pull")
async def pull(context: Context, body: Annotated[PullImageBody, Depends(json_body(PullImageBody))]) -> Response:
    """Bring an image from its registry, or see that it is here as the registry has it now."""
    account = to_account(body.registry)
    return await _told(lambda progress: context.orchestrator.images.pull(body.name, account, progress), image_view)


@router.post("/images/import")
async def bring(request: Request, context: Context, name: Annotated[str, Query(max_length=1024)]) -> Response:
    """The image in the body: an archive of an OCI layout, of `docker save`, or of a root file system, compressed or not."""
    return await _told(lambda progress: context.orchestrator.images.receive(name, body_chunks(request), progress), image_view)


@router.post("/templates/{template}/push")
async def push(context: Context, template: InPath, body: Annotated[PushImageBody, Depends(json_body(PushImageBody))]) -> Response:
    """Publish a template's root file system as an overlaybd-native image; blobs that the registry has are not sent."""
    account, wanted = to_account(body.registry), template_in_path(template)
    return await _told(lambda progress: context.orchestrator.push(wanted, body.name, account, progress), pushed_view)


@router.get("/layers", response_model=None)
async def layers(context: Context) -> list[LayerUseView]:
    """Every layer of the node's disk, the largest first, and what uses each."""
    return [layer_use_view(layer) for layer in await context.orchestrator.layers()]


@router.post("/layers/{layer_id}/verify", response_model=None)
async def verify(context: Context, layer_id: InPath) -> VerifiedView:
    """Read a layer and compare it with its checksum; a damaged one that a registry still has is made anew."""
    return verified_view(await context.orchestrator.verify_layer(unquote(layer_id)))


async def _told(work: Callable[[Progress], Awaitable[T]], view: Callable[[T], object]) -> Response:
    """Lines of JSON while `work` goes on."""
    told: asyncio.Queue[tuple[str, int | None, int | None] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def put(step: str, done: int | None, total: int | None) -> None:
        if told.qsize() < _LINES_WAITING_MAX:
            told.put_nowait((step, done, total))

    def tell(step: str, done: int | None, total: int | None) -> None:
        loop.call_soon_threadsafe(put, step, done, total)

    task = asyncio.ensure_future(work(tell))
    task.add_done_callback(lambda _: told.put_nowait(None))
    try:
        first = await told.get()
    except asyncio.CancelledError:
        task.cancel()
        raise
    if first is None:
        task.result()  # its failure is an ordinary reply

    async def lines() -> AsyncIterator[bytes]:
        line = first
        try:
            while line is not None:
                yield _line({"step": line[0], "done": line[1], "total": line[2]})
                line = await told.get()
            yield _line(_outcome(task, view))
        finally:
            task.cancel()

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _outcome(task: asyncio.Future[T], view: Callable[[T], object]) -> dict[str, Any]:
    try:
        return {"image": view(task.result())}
    except AgentEnvError as error:
        return {"error": error_body(error.status, full_message(error), error.code)}


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
