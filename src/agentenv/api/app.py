"""The HTTP API of a node: joins routes, errors and middleware into one ASGI app. The wire contract is E2B's.

Every route but `/health` asks for a key first, or for the token of the volume or of the upload it serves; every error has the contract's
shape; nothing here keeps state but the idempotency cache. The app neither listens nor logs anywhere by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI

from agentenv.api import errors, openapi
from agentenv.api.auth import KeyRing, require_key
from agentenv.api.context import ApiContext
from agentenv.api.idempotency import IdempotencyCache
from agentenv.api.middleware import RawPath, RequestLog
from agentenv.api.routes import (
    builds,
    checkpoints,
    health,
    images,
    lifecycle,
    logs,
    metrics,
    sandboxes,
    secrets,
    snapshots,
    storage,
    tags,
    teams,
    templates,
    unbuilt,
    volume_content,
    volumes,
)
from agentenv.api.settings import ApiSettings
from agentenv.core.clock import Clock, SystemClock
from agentenv.orchestrator.protocol import Orchestrator


def create_app(
    orchestrator: Orchestrator,
    keys: KeyRing,
    settings: ApiSettings,
    clock: Clock | None = None,
    troubles: Mapping[str, str] | None = None,
) -> FastAPI:
    """The API of `orchestrator` for holders of `keys`. `clock` decides only how long idempotency keys live; `troubles` is what
    `/health` tells: looked at when asked.
    """
    creations = IdempotencyCache(clock or SystemClock())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await creations.aclose()

    # The framework's own pages are off: their request models would not say what `request_parts` really accepts; `openapi` does.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.context = ApiContext(orchestrator, keys, settings, creations, {} if troubles is None else troubles)
    app.include_router(health.router)
    # The first three have literal paths that the others, in this order, would take for ids.
    modules = (
        tags,
        builds,
        unbuilt,
        metrics,
        sandboxes,
        lifecycle,
        logs,
        snapshots,
        checkpoints,
        templates,
        teams,
        volumes,
        secrets,
        storage,
        images,
        openapi,
    )
    keyed = [module.router for module in modules]
    for router in keyed:
        app.include_router(router, dependencies=[Depends(require_key)])
    open_routers = (health.router, volume_content.router, builds.uploads)  # the last two ask for tokens of their own
    for router in open_routers[1:]:
        app.include_router(router)
    routes = [route for router in (*open_routers, *keyed) for route in router.routes]
    errors.install(app, routes)
    openapi.install(app, routes)
    app.add_middleware(RawPath)
    app.add_middleware(RequestLog)
    return app
