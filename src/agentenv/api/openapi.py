"""The OpenAPI document of the API, made from the routes: what each takes, what it answers, and how it fails.

The framework describes paths, queries and headers; bodies are read by `request_parts.json_body`, so their models are put in here.
Nobody lists routes by hand: one that is added is documented by its own signature, `responses` and docstring.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any, Never, get_type_hints

from fastapi import APIRouter, FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from agentenv import __version__
from agentenv.api.request_parts import body_model

router = APIRouter()
_REF = "#/components/schemas/{model}"
_PUBLIC = frozenset({"/health"})
_VOLUME_CONTENT = "/volumecontent/"
_UPLOADS = "/template-files/"
_ERROR = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {
        "code": {"type": "integer", "description": "The HTTP status."},
        "message": {"type": "string", "description": "Cause, and on a line of its own the next step."},
        "error_code": {"type": "string", "description": "Stable; decide by it, never by the text."},
    },
}
_VOLUME_ERROR = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
}


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Let `app.openapi()` describe `routes`, which `app` is made of."""
    documented = [route for route in routes if isinstance(route, APIRoute) and route.include_in_schema]

    def describe() -> dict[str, Any]:
        if not app.openapi_schema:
            app.openapi_schema = document(documented)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


@router.get("/openapi.json", include_in_schema=False, response_model=None)
async def read(request: Request) -> dict[str, Any]:
    """This document."""
    made: dict[str, Any] = request.app.openapi()
    return made


def document(routes: Sequence[APIRoute]) -> dict[str, Any]:
    """The whole document."""
    made = get_openapi(title="AgentENV", version=__version__, description="Sandboxes behind the E2B API.", routes=routes)
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas |= {"Error": _ERROR, "VolumeError": _VOLUME_ERROR}
    schemas.update(_body_schemas(routes))
    made["components"]["securitySchemes"] = {
        "key": {"type": "apiKey", "in": "header", "name": "X-API-KEY"},
        "ticket": {"type": "apiKey", "in": "query", "name": "ticket", "description": "Comes with the URL of an upload."},
        "volumeToken": {"type": "http", "scheme": "bearer", "description": "The token of one volume."},
    }
    for route in routes:
        for method in route.methods or ():
            _complete(made["paths"][route.path_format][method.lower()], route, schemas)
    return made


def _complete(operation: dict[str, Any], route: APIRoute, schemas: dict[str, Any]) -> None:
    """Body, reply, credential and failures of one operation."""
    if model := next(_models(route.dependant), None):
        required = any(field.is_required() for field in model.model_fields.values())
        schema = {"$ref": _REF.format(model=model.__name__)}
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    in_volume = route.path.startswith(_VOLUME_CONTENT)
    if route.path not in _PUBLIC:
        operation["security"] = [{"volumeToken": []} if in_volume else {"ticket": []} if route.path.startswith(_UPLOADS) else {"key": []}]
    operation["responses"].pop(str(HTTPStatus.UNPROCESSABLE_ENTITY.value), None)
    _describe_reply(operation["responses"], route, schemas)
    error = {"$ref": _REF.format(model="VolumeError" if in_volume else "Error")}
    content = {"application/json": {"schema": error}}
    operation["responses"]["4XX"] = {"description": "The request cannot be served as it is.", "content": content}
    operation["responses"]["5XX"] = {"description": "The node cannot serve it.", "content": content}
    present = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
    for name in re.findall(r"{(\w+)}", route.path_format):
        if name not in present:  # read from the path by the route itself
            parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            operation.setdefault("parameters", []).append(parameter)


def _models(dependant: Dependant) -> Iterator[type[BaseModel]]:
    """The body models among a route's dependencies."""
    for dependency in dependant.dependencies:
        if dependency.call is not None and (model := body_model(dependency.call)):
            yield model
        yield from _models(dependency)


def _body_schemas(routes: Sequence[APIRoute]) -> dict[str, Any]:
    models = {model.__name__: model for route in routes for model in _models(route.dependant)}
    _, definitions = models_json_schema([(model, "validation") for model in models.values()], ref_template=_REF)
    found: dict[str, Any] = definitions.get("$defs", {})
    return found


def _describe_reply(responses: dict[str, Any], route: APIRoute, schemas: dict[str, Any]) -> None:
    """The JSON a route answers with, by its return annotation; its parts go to `schemas`. A route may describe its own instead."""
    status = str(route.status_code or HTTPStatus.OK.value)
    returned = get_type_hints(route.endpoint).get("return")
    if returned is Never:
        responses.pop(status)
    elif returned is not None and not (isinstance(returned, type) and issubclass(returned, Response)):
        schema = TypeAdapter(returned).json_schema(ref_template=_REF, mode="serialization")
        schemas.update(schema.pop("$defs", {}))
        if "properties" in schema:
            schemas[schema["title"]] = schema
            schema = {"$ref": _REF.format(model=schema["title"])}
        responses[status]["content"] = {"application/json": {"schema": schema}}
