"""JSON that was written elsewhere, or long ago: parsed, and held against the types of a dataclass.

Whatever is read from a file or a server may be damaged or made up. What passes here has the types
that the code behind it takes for granted.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false",
    type(None): "null", dict: "an object", list: "a list", tuple: "a list", Sequence: "a list",
}  # fmt: skip


def parse_json(data: bytes | str) -> Any:
    """The document; ValueError for whatever is none, one that nests too deep included."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def misfit(kinds: Mapping[str, Any] | type, found: Mapping[str, Any]) -> str | None:
    """What is wrong with the first field that is of another type, in words; None if all fit.

    `kinds` are types by name, or a dataclass. A field that is not there counts as null.
    """
    wanted = _hints(kinds) if isinstance(kinds, type) else kinds
    for name, kind in wanted.items():
        if not _fits(kind, found.get(name)):
            if name not in found:
                return f"{name} is missing; expected {_words(kind)}"
            return f"{name} is {repr(found[name])[:60]}; expected {_words(kind)}"
    return None


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(kind: Any, value: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(each, value) for each in inner)
    if origin is Literal:
        return value in inner
    if origin in (list, tuple, Sequence):
        if inner[0] is int:  # token ids, by the million
            return isinstance(value, list) and {int}.issuperset(map(type, value))
        return isinstance(value, list) and all(_fits(inner[0], each) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(inner[1], each) for each in value.values())
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _words(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_words(each) for each in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _WORDS.get(get_origin(kind) or kind, str(kind))
