"""GET /docs: every route and every field of every request, on a page that loads nothing else."""

from __future__ import annotations

from html import escape
from typing import Any

from starlette.responses import HTMLResponse

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
