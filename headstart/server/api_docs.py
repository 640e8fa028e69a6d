"""The OpenAPI document, and GET /docs, which shows it on a page that loads nothing else.

Bodies are parsed by hand, within limits, so their schemas are added to the document here.
"""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse

from headstart.server.answer_schemas import REFERENCE, SCHEMAS, answered, reference
from headstart.server.apis.messages_request import CountTokensRequest, MessagesRequest
from headstart.server.apis.responses_request import ResponsesRequest
from headstart.server.completions import CompletionRequest
from headstart.server.protocol.base import HARMLESS, Part
from headstart.server.protocol.requests import ChatRequest
from headstart.server.tokens import DetokenizeRequest, TokenizeRequest

_BODIES = (
    ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CountTokensRequest,
    TokenizeRequest, DetokenizeRequest,
)  # fmt: skip
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
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Headstart: routes and fields</title>
<style>
:root {{ color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
td, th {{ text-align: left; vertical-align: top; padding: 0.1rem 1rem 0.1rem 0 }}
</style>
<h1>Headstart {version}</h1>
<p>{description}</p>
<p>For programs: <a href="openapi.json">openapi.json</a>.</p>
<h2>Routes</h2><table>{routes}</table>
{bodies}
</html>"""
_POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


def body_of(kind: type[Part], answer: str, *, streams: bool = False) -> dict[str, Any]:
    """What a route says about its body, its answers and its refusals."""
    schema = reference(kind.__name__)
    refusal = {"application/json": {"schema": reference("Error")}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            **answered(answer, streams=streams)["responses"],
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
                [(kind, "validation") for kind in _BODIES], ref_template=REFERENCE
            )
            components = made.setdefault("components", {}).setdefault("schemas", {})
            components |= {**schemas["$defs"], "Error": _ERROR, **SCHEMAS}
            _without_422(made)
            made["info"]["description"] = _harmless()
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _without_422(document: dict[str, Any]) -> None:
    """FastAPI lists answers of its own checks, which no route here leaves anything to."""
    for ways in document["paths"].values():
        for route in ways.values():
            route["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _harmless() -> str:
    listed = "; ".join(f"`{name}` ({why})" for name, why in HARMLESS.items())
    return f"Accepted and without effect: {listed}. Any other field not listed here is refused."


def fields_page(document: dict[str, Any]) -> HTMLResponse:
    """The OpenAPI document for people."""
    routes = [
        _row(f"{method.upper()} {path}", _body_link(route), route.get("description", ""))
        for path, ways in document["paths"].items()
        for method, route in ways.items()
    ]
    schemas = document["components"]["schemas"]
    text = _PAGE.format(
        version=escape(document["info"]["version"]),
        description=escape(document["info"].get("description", "")),
        routes="".join(routes),
        bodies="".join(_body(name, schema) for name, schema in schemas.items()),
    )
    return HTMLResponse(text, headers=_POLICY)


def _body_link(route: dict[str, Any]) -> str:
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    return _kind(content["schema"]) if content else ""


def _body(name: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = [
        _row(field, _kind(known) + (" (needed)" if field in needed else ""),
             known.get("description", ""))
        for field, known in schema.get("properties", {}).items()
    ]  # fmt: skip
    return f'<h2 id="{escape(name)}">{escape(name)}</h2><table>{"".join(rows)}</table>'


def _row(name: str, kind: str, note: str) -> str:
    return f"<tr><th><code>{escape(name)}</code></th><td>{kind}</td><td>{escape(note)}</td></tr>"


def _kind(schema: dict[str, Any]) -> str:
    """What a value may be, in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(part) for part in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(escape(str(value)) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    kind = schema.get("type", "anything")
    return escape(kind if isinstance(kind, str) else " or ".join(kind))
