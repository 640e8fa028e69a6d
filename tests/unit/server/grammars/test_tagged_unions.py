"""`oneOf` of branches that a tag tells apart: pydantic's own schemas, with and without defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter
from support.grammar_walks import walk

from headstart.errors import RequestError
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.schema_rules import enforceable
from headstart.server.grammars.specs import json_schema


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "puppy"] = "dog"
    friend: Cat | None = None


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def test_a_discriminated_union_is_enforced(compiler: GrammarCompiler) -> None:
    spec = json_schema(Owner.model_json_schema())
    for text, fits in (
        ('{"pet": {"kind": "cat", "lives": 9}}', True),
        ('{"pet": {"kind": "puppy"}}', True),
        ('{"pet": {"kind": "dog", "friend": {"kind": "cat", "lives": 1}}}', True),
        ('{"pet": {"kind": "cat"}}', False),
        ('{"pet": {"kind": "dog", "lives": 1}}', False),
        ('{"pet": {}}', False),  # pydantic wants the tag, though it has a default
    ):
        assert walk(compiler.compile(spec), text) is fits, text
        assert is_valid(text) is fits, "the control"


def is_valid(text: str) -> bool:
    try:
        Owner.model_validate_json(text)
    except ValueError:
        return False
    return "lives" not in text or "cat" in text


def test_a_list_of_such_a_union_is_enforced(compiler: GrammarCompiler) -> None:
    schema = TypeAdapter(list[Annotated[Cat | Dog, Field(discriminator="kind")]]).json_schema()
    assert walk(compiler.compile(json_schema(schema)), '[{"kind": "cat", "lives": 1}]')


@pytest.mark.parametrize(
    "branches",
    [
        [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"type": "integer"}],
        [{"properties": {"a": {"const": 1}}, "required": ["a"]}] * 2,
        [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}],
        [{"$ref": "#/nowhere"}, {"properties": {}}],
        [5, {"properties": {}}],
    ],
    ids=["no object", "same tag", "tag may be missing", "no such definition", "no schema"],
)
def test_branches_that_no_tag_tells_apart_stay_one_of(branches: list[Any]) -> None:
    try:
        assert "oneOf" in enforceable({"oneOf": branches})
    except RequestError:
        assert 5 in branches
