"""What is wrong with a field of a body: its name, a sentence, and OpenAI's code for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headstart.server.protocol.base import REFUSED, STRUCTURED
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
_SHOULD = "should be "
Place = tuple[str | int, ...]  # as ("messages", 0, "role")


def field_refusal(
    error: ValidationError, body: Mapping[str, Any], known: Iterable[str] = ()
) -> Refusal:
    """About the first unknown field, else about the first field with a bad value.

    `known` are the names that an unknown one may have been meant for.
    """
    found = error.errors(include_url=False, include_context=False)
    unknown = [detail for detail in found if detail["type"] == "extra_forbidden"]
    about, details = _nearest(unknown[:1] or found, body)
    name = _name(about)[:_LONGEST_NAME]
    kind = details[0]["type"]
    said = _unknown(about, known) if kind == "extra_forbidden" else _message(name, details)
    return Refusal(400, said, param=name, code=_code(name, kind))


def _nearest(
    found: list[ErrorDetails], body: Mapping[str, Any]
) -> tuple[Place, list[ErrorDetails]]:
    """The place in the first bad field up to which most was right, and what is wrong there.

    A field that may be of several kinds has a complaint of each. The kind that was meant is the one
    that came furthest; a value of the right kind that is out of bounds is wrong for that alone.
    """
    places = [_place(detail["loc"], body, detail) or detail["loc"][:1] for detail in found]
    furthest = max((place for place in places if place[:1] == places[0][:1]), key=_progress)
    here = [detail for detail, place in zip(found, places, strict=True) if place == furthest]
    meant = [detail for detail in here if not detail["type"].endswith("_type")]
    is_in_kind = any(detail["type"] != "literal_error" for detail in meant)
    return furthest, meant if is_in_kind else here


def _progress(place: Place) -> tuple[int, list[int]]:
    return len(place), [part for part in place if isinstance(part, int)]


def _place(loc: Place, value: Any, detail: ErrorDetails) -> Place | None:
    """Where in `value` an error is, None if not there.

    pydantic's path also names kinds that a value may be of. A body may have keys of the same name,
    so what counts is whether the path ends at what was complained about.
    """
    if not loc:
        return () if value is detail["input"] else None
    part, rest = loc[0], loc[1:]
    if not rest and detail["type"] == "missing":
        return (part,)
    if isinstance(value, list) if isinstance(part, int) else _has(value, part):
        inside = _place(rest, value[part], detail)
        if inside is not None:
            return (part, *inside)
    return _place(rest, value, detail)


def _has(value: Any, name: str) -> bool:
    return isinstance(value, Mapping) and name in value


def _name(place: Place) -> str:
    """A place as text, like `messages[0].role`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


def _unknown(place: Place, known: Iterable[str]) -> str:
    name = _name(place)[:_LONGEST_NAME]
    if name in REFUSED:
        return f"the field {name!r} is not implemented: {REFUSED[name]}."
    inside = "".join(f"{part}." for part in place[:-1])
    names = [*known, *STRUCTURED]
    beside = [other.removeprefix(inside) for other in names if other.startswith(inside)]
    beside = [other for other in beside if "." not in other]
    near = [inside + other for other in get_close_matches(str(place[-1]), beside, 1)]
    do = f"Did you mean {near[0]!r}?" if near else "Leave it out."
    return f"the field {name!r} is not known. {do}"


def _message(name: str, details: Sequence[ErrorDetails]) -> str:
    if details[0]["type"] == "missing":
        return f"the field {name!r} is missing."
    first, *others = dict.fromkeys(_said(detail) for detail in details)
    said = ", or ".join([first, *(other.removeprefix(_SHOULD) for other in others)])
    return f"the field {name!r} {said}."


def _said(detail: ErrorDetails) -> str:
    """What pydantic says, without the names of our classes."""
    if detail["type"] in ("model_type", "dict_type"):
        return f"{_SHOULD}an object"
    said = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"{said[:1].lower()}{said[1:]}"


def _code(name: str, kind: str) -> str:
    if kind == "extra_forbidden":
        return "unsupported_parameter" if name in REFUSED else "unknown_parameter"
    return _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
