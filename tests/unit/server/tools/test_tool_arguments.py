"""Arguments that are written as text: the tool's schema says which of them are JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.server.tools.arguments import xml_arguments


def read(text: str, schema: Any, **root: Any) -> Any:
    """The value of one argument whose schema is this."""
    return json.loads(xml_arguments([("a", text)], {"properties": {"a": schema}, **root}))["a"]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("007", {"type": "string"}, "007"),
        ("true", {"enum": ["true", "false"]}, "true"),
        ("true", {"type": "boolean"}, True),
        ("7", {"type": ["integer", "string"]}, 7),
        ("true", {"type": ["integer", "string"]}, "true"),
        ('"7"', {"type": ["integer", "string"]}, '"7"'),
        ("\n[1]\n", {"type": "array"}, [1]),
        ("seven", {"type": "integer"}, "seven"),
        ("NaN", {"type": "number"}, "NaN"),
        ("7", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "7"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("7", {"$ref": "#/$defs/x"}, "7"),
    ],
)
def test_the_schema_decides(text: str, schema: Any, value: Any) -> None:
    found = read(text, schema, **{"$defs": {"x": {"type": "string"}}})
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("hi", "hi"), ('"hi"', "hi"), ('"7"', "7"), ('"hi', '"hi')]
)
def test_where_nothing_is_known_what_reads_as_json_is_json(text: str, value: Any) -> None:
    """Quoted text as well: its quotes go."""
    assert read(text, None) == read(text, {}) == value


@pytest.mark.parametrize("schema", [{"properties": [1]}, {"properties": None}, [], None, True])
def test_a_schema_that_names_no_arguments_says_nothing(schema: Any) -> None:
    assert json.loads(xml_arguments([("a", "7")], schema)) == {"a": 7}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": [{}]},
        {"type": {"x": 1}},
        {"type": 3},
        {"type": ["string", []]},
        {"$ref": "#/x"},
        {"$ref": "#"},
        {"anyOf": 3},
        {"enum": {}},
    ],
    ids=str,
)
def test_types_that_are_none_break_nothing(schema: Any) -> None:
    """Regression: a type that is no text ended the answer with a 500."""
    assert read("x", schema, x={"type": [{}]}) == "x"
