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


class Leaf(BaseModel):
    kind: Literal["leaf"] = "leaf"


class Tree(BaseModel):
    kind: Literal["tree"] = "tree"
    left: Annotated[Tree | Leaf, Field(discriminator="kind")]


def test_a_recursive_union_is_enforced(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(json_schema(Tree.model_json_schema()))
    leaf = '{"kind": "leaf"}'
    inner = f'{{"kind": "tree", "left": {leaf}}}'
    assert walk(grammar, f'{{"kind": "tree", "left": {inner}}}')
    assert not walk(grammar, '{"kind": "tree", "left": {}}'), "the tag is required"


@pytest.mark.parametrize("required", [["tag"], []], ids=["required", "with a default"])
def test_a_chain_of_definitions_is_walked_once(required: list[str]) -> None:
    """Each level refers twice to the next: written out, there would be 2^40 schemas."""
    tag = {"tag": {"const": "a"}}
    levels: dict[str, Any] = {"D40": {"properties": tag, "required": required}}
    for level in range(40):
        union = {
            "oneOf": [{"$ref": f"#/$defs/D{level + 1}"}],
            "discriminator": {"propertyName": "tag"},
        }
        levels[f"D{level}"] = {"properties": {**tag, "x": union, "y": union}, "required": required}
    found = enforceable({"$ref": "#/$defs/D0", "$defs": levels})
    last = found["$defs"]["D39"]["properties"]["x"]["anyOf"][0]["$ref"].removeprefix("#/$defs/")
    assert found["$defs"][last]["required"] == ["tag"]
    assert len(found["$defs"]) == (41 if required else 81)


def test_a_schema_of_too_many_parts_is_refused() -> None:
    many = [{"type": "null"}] * 50_001
    with pytest.raises(RequestError, match="more than 50000 schemas"):
        enforceable({"anyOf": many})


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
