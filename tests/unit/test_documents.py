"""JSON of others: parsed within bounds, and held against types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from headstart.documents import misfit, parse_json


@dataclass
class Kinds:
    whole: int
    number: float
    text: str | None
    list_of: list[int]
    named: dict[str, float]
    either: Literal["a", "b"]
    any_at_all: Any
    several: Sequence[str]


GOOD: dict[str, Any] = {
    "whole": 1, "number": 1, "text": None, "list_of": [1], "named": {"x": 0.5}, "either": "a",
    "any_at_all": object(), "several": ["x"],
}  # fmt: skip


def test_what_fits_is_taken() -> None:
    assert misfit(Kinds, GOOD) is None
    assert misfit({"a": int | None}, {}) is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("whole", True, "a whole number"), ("whole", 1.0, "a whole number"),
        ("number", "1", "a number"), ("number", True, "a number"), ("text", 5, "text or null"),
        ("list_of", [1, "x"], "a list"), ("list_of", {}, "a list"), ("named", [], "an object"),
        ("named", {"x": []}, "an object"), ("either", "c", "'a' or 'b'"),
        ("several", "x", "a list"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(name: str, value: Any, expected: str) -> None:
    assert misfit(Kinds, {**GOOD, name: value}) == f"{name} is {value!r}; expected {expected}"


def test_what_is_missing_is_named() -> None:
    assert misfit({"a": int}, {}) == "a is missing; expected a whole number"


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe\x00"])
def test_whatever_is_no_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(data)
    assert parse_json(b'{"a": [1]}') == {"a": [1]}
