"""What every route works with: one value, made by `create_app`, reached through the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends
from starlette.requests import Request

from agentenv.api.idempotency import IdempotencyCache
from agentenv.api.settings import ApiSettings
from agentenv.orchestrator.protocol import Orchestrator

if TYPE_CHECKING:
    from agentenv.api.auth import KeyRing


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The parts of the node that the API speaks for."""

    orchestrator: Orchestrator
    keys: KeyRing
    settings: ApiSettings
    creations: IdempotencyCache
    troubles: Mapping[str, str]  # by part of the node: what it cannot do now


def context_of(request: Request) -> ApiContext:
    """The context of the app that serves this request."""
    return cast(ApiContext, request.app.state.context)


Context = Annotated[ApiContext, Depends(context_of)]
