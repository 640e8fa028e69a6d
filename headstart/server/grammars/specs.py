"""The forms of structured output that clients can ask for, all turned into one.

Every kind (JSON object, JSON schema, regular expression, EBNF, choice) becomes a format of
xgrammar's structural tags, so that all of them can stand inside a larger one: after the model's
thinking, or as the arguments of a tool call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

from headstart.errors import RequestError, some
from headstart.server.grammars.schema_rules import enforceable
from headstart.server.refusals import about

Format = dict[str, Any]

# Between two parts of a JSON text: where more are allowed a small model may write nothing else.
_MAX_SPACES = 1


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar that is not compiled yet; equal ones are compiled once."""

    what: str  # for messages: "JSON schema", "regex", ...
    text: str  # a structural tag's format, as JSON
    # Which of the request's asks for it.
    field: str | None = dataclass_field(default=None, compare=False)

    @classmethod
    def of(cls, what: str, format: Format, field: str | None = None) -> GrammarSpec:
        try:
            return cls(what, json.dumps(format, ensure_ascii=False, allow_nan=False), field)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"the {what} cannot be written as JSON: {error}.", field=field
            ) from error

    @property
    def format(self) -> Format:
        found: Format = json.loads(self.text)
        return found

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode("utf-8", "surrogatepass"))


def json_object() -> GrammarSpec:
    return GrammarSpec.of("JSON object", schema_format({"type": "object"}))


def json_schema(schema: Any, *, relaxed: bool = False) -> GrammarSpec:
    """`relaxed` leaves out what cannot be enforced, where it would else be refused."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is text that is not JSON: {error}.") from error
    return GrammarSpec.of("JSON schema", schema_format(enforceable(schema, relaxed=relaxed)))


def regex(pattern: Any) -> GrammarSpec:
    _text("regex", pattern)
    return GrammarSpec.of("regex", {"type": "regex", "pattern": pattern})


def ebnf(grammar: Any) -> GrammarSpec:
    """EBNF as llama.cpp and xgrammar write it; its first rule is called `root`."""
    _text("grammar", grammar)
    return GrammarSpec.of("grammar", {"type": "grammar", "grammar": grammar})


def choice(texts: Any) -> GrammarSpec:
    if not isinstance(texts, list) or not texts or not all(t and type(t) is str for t in texts):
        raise RequestError("choice is not a list of texts with at least one character each.")
    each = [{"type": "const_string", "value": text} for text in dict.fromkeys(texts)]
    return GrammarSpec.of("choice", {"type": "or", "elements": each})


def schema_format(schema: Any, style: str = "json") -> Format:
    return {
        "type": "json_schema", "json_schema": schema, "style": style,
        "max_whitespace_cnt": _MAX_SPACES,
    }  # fmt: skip


_KINDS: dict[str, Callable[[Any], GrammarSpec]] = {
    "json": json_schema, "regex": regex, "grammar": ebnf, "choice": choice,
}  # fmt: skip


def grammar_spec(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> GrammarSpec | None:
    """What `response_format` or `structured_outputs` of a request asks for; None for free text."""
    with about("response_format"):
        asked = _response_format(response_format) if response_format is not None else None
    if structured_outputs is None:
        return asked
    given = [name for name, value in structured_outputs.items() if value is not None]
    if len(given) != 1 or given[0] not in _KINDS:
        raise RequestError(
            f"structured_outputs holds {some(given) or 'nothing'}; give exactly one of "
            f"{', '.join(_KINDS)}.",
            field="structured_outputs",
        )
    if asked is not None:
        raise RequestError(
            "response_format and structured_outputs are both given; give one.",
            field="response_format",
        )
    where = f"structured_outputs.{given[0]}"
    with about(where):
        return replace(_KINDS[given[0]](structured_outputs[given[0]]), field=where)


def _response_format(asked: Mapping[str, Any]) -> GrammarSpec | None:
    kind, more = asked.get("type"), sorted(set(asked) - {"type"})
    if kind == "json_schema":
        _refuse(more, ("json_schema",), "response_format")
        with about("response_format.json_schema"):
            return replace(
                _named_schema(asked.get("json_schema")), field="response_format.json_schema"
            )
    _refuse(more, (), f"response_format of type {str(kind)[:40]!r}")
    if kind == "text":
        return None
    if kind == "json_object":
        return replace(json_object(), field="response_format")
    raise RequestError(
        f"response_format has the type {str(kind)[:40]!r}; give text, json_object or json_schema."
    )


def _named_schema(named: Any) -> GrammarSpec:
    if not isinstance(named, Mapping) or "schema" not in named:
        raise RequestError(
            'response_format.json_schema is not {"name": ..., "schema": {...}}; give the schema.'
        )
    known = ("name", "description", "schema", "strict")
    _refuse(sorted(set(named) - set(known)), (), "response_format.json_schema")
    strict = named.get("strict")
    if strict is not None and type(strict) is not bool:
        raise RequestError("response_format.json_schema.strict is neither true nor false.")
    return json_schema(named["schema"], relaxed=strict is False)


def _refuse(found: list[str], known: tuple[str, ...], where: str) -> None:
    if unknown := [name for name in found if name not in known]:
        raise RequestError(f"{where} holds {some(unknown)}, which is not known. Leave it out.")


def _text(what: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"the {what} is not a text with at least one character.")
