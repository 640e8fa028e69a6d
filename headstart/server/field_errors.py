"""What is wrong with a field of a body: its name, a sentence, and OpenAI's code for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headstart.server.protocol.base import REFUSED
from headstart.server.refusals import Refusal

_CODES = {
    "missing": "missing_required_parameter",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "string_too_short": "empty_string",
    "string_too_long": "string_above_max_length",
    "greater_than": "integer_below_min_value",
    "greater_than_equal": "integer_below_min_value",
    "less_than": "integer_above_max_value",
    "less_than_equal": "integer_above_max_value",
}
_LONGEST_NAME = 80


def field_refusal(error: ValidationError, body: Mapping[str, Any]) -> Refusal:
    """About the first unknown field, else about the first field with a bad value."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [detail for detail in found if detail["type"] == "extra_forbidden"]
    detail = (unknown or found)[0]
    name = _name(detail, body)[:_LONGEST_NAME]
    return Refusal(400, _message(name, detail), param=name, code=_code(name, detail["type"]))


def _name(detail: ErrorDetails, body: Mapping[str, Any]) -> str:
    """Like `messages[0].role`; the path names members of a union, too, which no body has."""
    name, place = "", cast(Any, body)
    for part in detail["loc"]:
        if isinstance(part, int) and isinstance(place, list):
            name += f"[{part}]"
            place = place[part]
        elif isinstance(place, Mapping) and (part in place or detail["type"] == "missing"):
            name += f".{part}"
            place = place.get(part)
    return name.removeprefix(".")


def _message(name: str, detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        why = REFUSED.get(name)
        hint = f"{why[0].upper()}{why[1:]}. " if why else ""
        return f"the field {name!r} is not implemented. {hint}Leave it out."
    if detail["type"] == "missing":
        return f"the field {name!r} is missing."
    said = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"the field {name!r} {said[:1].lower()}{said[1:]}."


def _code(name: str, kind: str) -> str:
    if kind == "extra_forbidden":
        return "unsupported_parameter" if name in REFUSED else "unknown_parameter"
    return _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
