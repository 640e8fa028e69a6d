"""Grammars that a client may ask for to keep a server busy."""

from __future__ import annotations

from typing import Any


def hostile_grammars() -> list[dict[str, Any]]:
    """What grammars can be asked for that is large, deep, ambiguous or none."""
    deep: Any = {"type": "string"}
    for _ in range(90):
        deep = {"type": "object", "properties": {"a": deep}}
    schemas: list[Any] = [
        deep, {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": [["string"]]}, {"properties": [1]}, {"enum": ["x" * 50] * 20_000},
        {"type": "array", "minItems": 10**9}, {"type": "string", "minLength": 10**9},
        {"type": "string", "pattern": "(a*)*" * 50}, {"allOf": [{}] * 2000}, {"not": {}},
        {"properties": {f"p{n}": {"type": "string"} for n in range(5000)}}, True, 5, None,
    ]  # fmt: skip
    regexes = ["(((a{1,99}){1,99}){1,99}){1,99}", "[" * 1000, "(a|a)*" * 100, "a{99999}", "(?<=a)b"]
    grammars = [
        "root ::= root", 'root ::= "a"\n' * 3000, 'root ::= root "a" | "a"', "", "root ::=",
        'root ::= "a" root root root | ""',
    ]  # fmt: skip
    return [
        *({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}}
          for s in schemas),
        *({"structured_outputs": {"regex": text}} for text in regexes),
        *({"structured_outputs": {"grammar": text}} for text in grammars),
    ]  # fmt: skip
