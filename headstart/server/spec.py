"""The OpenAPI document: bodies are parsed by hand, within limits; their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from headstart.server.protocol.base import HARMLESS, Part
from headstart.server.protocol.chat import ChatRequest
from headstart.server.protocol.completion import CompletionRequest
from headstart.server.protocol.tokens import DetokenizeRequest, TokenizeRequest

_BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def body_of(kind: type[Part]) -> dict[str, Any]:
    """What a route says about its body and its refusals."""
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    refusal = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "4XX": {"description": "refused: the message says why", "content": refusal},
            "5XX": {"description": "failed, or not ready", "content": refusal},
        },
    }


def describe(app: FastAPI) -> None:
    """Let the app's document hold those schemas, and the list of harmless fields."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = models_json_schema(
                [(kind, "validation") for kind in _BODIES], ref_template=_REFERENCE
            )
            components = made.setdefault("components", {}).setdefault("schemas", {})
            components |= {**schemas["$defs"], "Error": _ERROR}
            made["info"]["description"] = _harmless()
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _harmless() -> str:
    listed = "; ".join(f"`{name}` ({why})" for name, why in HARMLESS.items())
    return f"Accepted and without effect: {listed}. Any other field not listed here is refused."
