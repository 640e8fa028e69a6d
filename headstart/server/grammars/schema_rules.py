"""Which JSON schemas a grammar can enforce, checked before anything is compiled.

xgrammar passes over keywords that it does not know, and over some combinations of those it does.
An answer that breaks its schema would be the result, so such schemas are refused by name, or, where
a caller only needs JSON that parses (`relaxed`), the keyword is taken out. What is no schema at all
is refused always.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.errors import RequestError, some
from headstart.server.grammars.tagged_unions import (
    referred,
    tagged_branches,
    with_tag,
    without,
)

MAX_DEPTH = 48  # schemas inside schemas; the time to compile grows faster than the depth
MAX_NODES = 50_000  # schemas, and what is compared to tell branches apart

# Keywords that say something to people and forbid nothing.
_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
     "$schema", "$id", "$comment", "discriminator", "strict")
)  # fmt: skip
_DEFINITIONS = frozenset(("$defs", "definitions"))
_BY_TYPE = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
                          "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "object": frozenset(("properties", "required", "additionalProperties", "patternProperties",
                         "propertyNames", "minProperties", "maxProperties",
                         "unevaluatedProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")),
    "boolean": frozenset(),
    "null": frozenset(),
}  # fmt: skip
_KNOWN = frozenset().union(*_BY_TYPE.values())
_RANGE = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
# Keywords that hold schemas: by name, in a list, or one.
_OF_NAMES = frozenset(("properties", "patternProperties", *_DEFINITIONS))
_OF_LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_OF_ONE = frozenset(("items", "additionalProperties", "propertyNames", "unevaluatedItems",
                     "unevaluatedProperties"))  # fmt: skip
# Pairs of which only one would be enforced.
_EITHER_OR = (
    ("pattern", frozenset(("minLength", "maxLength", "format"))),
    ("format", frozenset(("minLength", "maxLength"))),
    ("multipleOf", _RANGE),
    ("patternProperties", frozenset(("properties", "propertyNames"))),
    ("propertyNames", frozenset(("properties",))),
)
# Not json-pointer, nor relative-json-pointer: what xgrammar allows there may hold bare quotes.
FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
     "uri-reference", "uri-template")
)  # fmt: skip
_KINDS: dict[str, Any] = {
    "string": str, "boolean": bool, "null": type(None), "object": Mapping, "array": list,
}  # fmt: skip


def enforceable(schema: Any, *, relaxed: bool = False) -> Any:
    """The schema as a grammar can enforce it; RequestError says what cannot be."""
    check_form(schema)
    return _Walk(relaxed, schema).all()


def check_form(schema: Any, where: str = "#", depth: int = 0) -> None:
    """RequestError where a keyword that decides how values are read is of another kind."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    types = schema.get("type", "")
    if not all(isinstance(kind, str) for kind in (types if isinstance(types, list) else [types])):
        raise _malformed("type", types, where, "text, or a list of texts")
    if not isinstance(schema.get("format", ""), str):
        raise _malformed("format", schema["format"], where, "text")
    for name, value in schema.items():
        if name in _OF_NAMES:
            if not isinstance(value, Mapping):
                raise _malformed(name, value, where, "an object of schemas")
            for key, inner in value.items():
                check_form(inner, f"{where}/{name}/{key}", depth + 1)
        elif name in _OF_LISTS and isinstance(value, list):
            for number, inner in enumerate(value):
                check_form(inner, f"{where}/{name}/{number}", depth + 1)
        elif name in _OF_ONE:
            check_form(value, f"{where}/{name}", depth + 1)


def _malformed(name: str, found: Any, where: str, expected: str) -> RequestError:
    return RequestError(
        f"the JSON schema's {name} at {where[:80]} is {str(found)[:60]!r}; give {expected}."
    )


class _Walk:
    def __init__(self, relaxed: bool, root: Any):
        self._relaxed, self._root = relaxed, root
        self._num_nodes = 0
        self._copies: dict[tuple[str, str], str] = {}  # names of definitions, by ref and tag

    def all(self) -> Any:
        """The whole schema, with the definitions that were copied for their tags."""
        own = self.schema(self._root, "#", 0)
        made: dict[str, Any] = {}
        while len(made) < len(self._copies):  # a copy may need others
            for (ref, tag), name in list(self._copies.items())[len(made) :]:
                found = referred({"$ref": ref}, self._root)
                assert found is not None  # or there were no tags to compare
                made[name] = self.schema(with_tag(found, tag), ref, 1)
        return {**own, "$defs": {**own.get("$defs", {}), **made}} if made else own

    def _required_in(self, ref: str, tag: str) -> str:
        """A reference to a copy of a definition in which the tag is required."""
        if (ref, tag) not in self._copies:
            taken = self._root.get("$defs", {})
            name = f"tagged_{len(self._copies)}"
            while name in taken:
                name += "_"
            self._copies[ref, tag] = name
        return f"#/$defs/{self._copies[ref, tag]}"

    def _spend(self, count: int) -> None:
        self._num_nodes += count
        if self._num_nodes > MAX_NODES:
            raise RequestError(
                f"the JSON schema holds more than {MAX_NODES} schemas and tags to compare; give a "
                "smaller one."
            )

    def schema(self, schema: Any, where: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise RequestError(
                f"the JSON schema at {where} is a {type(schema).__name__}; give an object or a "
                "boolean."
            )
        if depth > MAX_DEPTH:
            raise RequestError(
                f"the JSON schema is nested more than {MAX_DEPTH} levels deep; flatten it, or use "
                "$ref."
            )
        self._spend(1)
        own = {k: v for k, v in schema.items() if k not in _NOTES and k not in _DEFINITIONS}
        if isinstance(own.get("oneOf"), list):
            apart = tagged_branches(
                own["oneOf"], schema.get("discriminator"), self._root,
                require=self._required_in, spend=self._spend,
            )  # fmt: skip
            own = own if apart is None else {**without(own, "oneOf"), "anyOf": apart}
        own = self._structure(own, where, depth)
        for name in _DEFINITIONS & schema.keys():
            own[name] = self._each(schema[name], f"{where}/{name}", depth)
        return own

    def _structure(self, own: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        for name in ("$ref", "const", "enum", "anyOf", "oneOf", "allOf"):
            if name in own:
                return self._only(name, own, where, depth)
        return self._typed(own, where, depth)

    def _only(self, name: str, own: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        """Keywords beside which no other one would be enforced."""
        value, beside = own[name], set(own) - {name}
        if name in ("const", "enum"):
            values = value if name == "enum" else [value]
            if "type" in beside and isinstance(values, list):
                if all(_is_of(item, own["type"]) for item in values):
                    beside.discard("type")
                elif self._relaxed:
                    value = [item for item in values if _is_of(item, own["type"])] or values
                    name = "enum"
        if beside:
            self._problem(f"{name} beside {some(sorted(beside))}", where)
        if name == "$ref":
            if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
                self._problem(f"$ref {str(value)[:60]!r}, which is not of the form #/...", where)
                return {}
        elif name in ("anyOf", "oneOf", "allOf"):
            if not isinstance(value, list) or not value:
                raise RequestError(
                    f"the JSON schema's {name} at {where} is not a list of schemas with at least "
                    "one entry."
                )
            if name == "allOf" and len(value) > 1:
                self._problem("allOf of several schemas", where)
                value = value[:1]
            # Two branches of oneOf may overlap in a way that no grammar can exclude.
            name = "anyOf" if self._relaxed and name == "oneOf" else name
            value = [self.schema(v, f"{where}/{name}/{i}", depth + 1) for i, v in enumerate(value)]
        return {name: value}

    def _typed(self, own: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        types = _types(own, where)
        unknown = sorted(set(own) - _KNOWN - {"type"})
        if not types and not unknown:
            implied = [kind for kind in ("object", "array") if own and set(own) <= _BY_TYPE[kind]]
            types = implied
            if own and not implied:
                unknown = sorted(own)
        meant = frozenset().union(*(_BY_TYPE[kind] for kind in types)) if types else frozenset()
        if len(types) > 1 and (bad := sorted(set(own) & {"multipleOf"})):
            unknown += bad
        kept = {name: value for name, value in own.items() if name in meant}
        if unknown:
            advice = "" if types else " without type"
            self._problem(f"{some([repr(name) for name in unknown])}{advice}", where)
        for first, others in _EITHER_OR:
            if first in kept and (beside := others & kept.keys()):
                self._problem(f"{first} beside {some(sorted(beside))}", where)
                kept = {name: value for name, value in kept.items() if name not in beside}
        if kept.get("format", "date") not in FORMATS:
            self._problem(f"format {str(kept.pop('format'))[:40]!r}", where)
        if types:
            kept["type"] = types[0] if len(types) == 1 else types
        return self._inner(kept, where, depth)

    def _inner(self, kept: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        """Schemas inside, and what must be spelled out for xgrammar's strict mode."""
        for name in ("properties", "patternProperties"):
            if name in kept:
                kept[name] = self._each(kept[name], f"{where}/{name}", depth)
        for name in sorted(_OF_ONE & kept.keys()):
            kept[name] = self.schema(kept[name], f"{where}/{name}", depth + 1)
        if "prefixItems" in kept:
            if not isinstance(kept["prefixItems"], list):
                raise RequestError(f"the JSON schema's prefixItems at {where} is not a list.")
            kept["prefixItems"] = [
                self.schema(v, f"{where}/prefixItems/{i}", depth + 1)
                for i, v in enumerate(kept["prefixItems"])
            ]
        if {"minItems", "maxItems"} & kept.keys() and "prefixItems" not in kept:
            kept.setdefault("items", True)
        if {"minProperties", "maxProperties"} & kept.keys() and "properties" not in kept:
            kept.setdefault("additionalProperties", True)
        required = kept.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise RequestError(f"the JSON schema's required at {where} is not a list of names.")
        if missing := [name for name in required if name not in kept.get("properties", {})]:
            self._problem(f"required {some(missing)} that properties does not list", where)
            kept["required"] = [name for name in required if name not in missing]
        return kept

    def _each(self, schemas: Any, where: str, depth: int) -> dict[str, Any]:
        if not isinstance(schemas, Mapping):
            raise RequestError(f"the JSON schema at {where} is not an object of schemas.")
        return {str(k): self.schema(v, f"{where}/{k}", depth + 1) for k, v in schemas.items()}

    def _problem(self, what: str, where: str) -> None:
        if not self._relaxed:
            raise RequestError(
                f"the JSON schema has {what} at {where[:80]}, which cannot be enforced. Set strict "
                "to false to go without it, leave it out, or say it in another way."
            )


def _types(own: Mapping[str, Any], where: str) -> list[str]:
    found = own.get("type", [])
    types = found if isinstance(found, list) else [found]
    if "type" in own and (not types or not all(kind in _BY_TYPE for kind in types)):
        raise RequestError(
            f"the JSON schema has the type {str(found)[:60]!r} at {where[:80]}; expected "
            f"{', '.join(_BY_TYPE)}, or a list of them."
        )
    return types


def _is_of(value: Any, types: Any) -> bool:
    for kind in types if isinstance(types, list) else [types]:
        if kind in ("integer", "number"):
            number = (int, float) if kind == "number" else int
            if isinstance(value, number) and not isinstance(value, bool):
                return True
        elif kind in _KINDS and isinstance(value, _KINDS[kind]):
            return True
    return False
