"""Arguments of tool calls that are written one by one, as text: which of them are JSON.

The tool's own schema decides: what must be a string is taken as it stands, so that "007" or "true"
does not become something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Schemas = Mapping[str, Any]  # a tool's name -> the JSON schema of its arguments

_PYTHON_TYPES: dict[str, Any] = {
    "object": dict, "array": list, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip


def xml_arguments(values: Iterable[tuple[str, str]], schema: Any) -> str:
    """One JSON object; a name that comes twice keeps its last value, as in JSON."""
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    named = known if isinstance(known, Mapping) else {}
    found = {name: _value(text, named.get(name), schema) for name, text in values}
    return json.dumps(found, ensure_ascii=False)


def _value(text: str, schema: Any, root: Any) -> Any:
    plain = text.removeprefix("\n").removesuffix("\n")
    types = _types(schema, root)
    if types == {"string"}:
        return plain
    try:
        value = json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return plain
    if not types:  # nothing is known: text that reads as JSON is JSON, and loses its quotes, too
        return value
    fits = any(
        isinstance(value, _PYTHON_TYPES[kind])
        and not (isinstance(value, bool) and kind in ("integer", "number"))
        for kind in types - {"string"}
    )
    return value if fits or "string" not in types else plain


def _types(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """JSON types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve(schema["$ref"], root), root, depth + 1)
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        # A $ref may lead to what is no schema, where a type may be anything.
        named = {kind for kind in given if isinstance(kind, str)}
        return named & {"string", *_PYTHON_TYPES}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return {"string"} if all(isinstance(v, str) for v in values) else set()
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or []
    each = [_types(part, root, depth + 1) for part in parts] if isinstance(parts, list) else []
    return set().union(*each) if all(each) else set()


def is_object_schema(schema: Any, root: Any, depth: int = 0) -> bool:
    """Whether nothing but a JSON object fits."""
    if not isinstance(schema, Mapping) or depth > 8:
        return False
    if isinstance(schema.get("$ref"), str):
        return is_object_schema(_resolve(schema["$ref"], root), root, depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return all(is_object_schema(part, root, depth + 1) for part in schema[name])
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return isinstance(values, list) and all(isinstance(value, Mapping) for value in values)
    return schema.get("type") in ("object", ["object"])


def _resolve(reference: str, root: Any) -> Any:
    found = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
