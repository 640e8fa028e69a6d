"""Patterns of quantisation configs match as `re` matches them, in time that has a limit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.checkpoint.quantized.patterns import matches
from headstart.errors import BadConfig

ATOMS = [
    "a", "b", "1", ".", r"\.", r"\d", r"\W", "[ab]", "[^a]", "[a-b1.]", "^", "$", "(a|b)", "(?:ab)",
    "(?!a)", "(?=b.)", "(?:a|)", "(a.|b)?",
]  # fmt: skip
TIMES = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?"]
NAME = "model.layers.61.mlp.experts.120.gate_proj"
PARTS = st.lists(st.tuples(st.sampled_from(ATOMS), st.sampled_from(TIMES)), max_size=5)


@given(PARTS, PARTS, st.text("ab.1", max_size=7))
@settings(max_examples=300, deadline=None)
def test_patterns_match_as_re_matches_them(
    one: list[tuple[str, str]], other: list[tuple[str, str]], name: str
) -> None:
    pattern = "|".join("".join(a + t for a, t in parts) for parts in (one, other) if parts)
    try:
        expected = re.match(pattern, name) is not None
        found = matches(pattern, name)
    except (re.error, BadConfig):
        return
    assert found is expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (".*", True),
        ("model", True),
        ("layers", False),
        ("^model\\.layers\\.61\\.", True),
        ("model.layers.6", True),
        ("model\\.layers\\.6\\.", False),
        (r".*\.(?:60|61)\..*(gate|up)_proj$", True),
        (r".*\.layers\.([0-9]|[1-5]\d)\..*", False),
        ("^(?!.*mtp).*experts", True),
        ("^(?!.*experts).*", False),
        (r"model\.layers\.\d{1,2}\.mlp\.experts\.\d+\.\w+$", True),
    ],
)
def test_patterns_as_checkpoints_have_them(pattern: str, expected: bool) -> None:
    assert matches(pattern, NAME) is expected


@pytest.mark.parametrize("pattern", ["(a|aa)+b$", ".*.*.*.*.*.*.*.*!", "(?!.*.*.*.*z).*.*.*!"])
def test_patterns_that_re_tries_for_ages_end_at_once(pattern: str) -> None:
    assert not matches(pattern, "a" * 200)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("([a-z.]+)+!", "a repetition inside of a repeated group"),
        ("(?:a*){2}", "a repetition inside of a repeated group"),
        ("(", "not closed"),
        ("a)", "not opened"),
        ("[a", "a class of characters"),
        ("*a", "repeats nothing"),
        ("a**", "a repetition of a repetition"),
        ("(?i)a", "a group of another kind"),
        (r"(a)\1", r"with \\1"),
        ("a{5000}", r"with \{5000\}"),
        ("(?!.*(?!.*a))", "a look-ahead inside of a look-ahead"),
        ("(" * 500, "more than 20 groups"),
        ("a" * 5000, "more than 1000 characters"),
    ],
    ids=lambda value: value[:12],
)
def test_other_patterns_are_refused(pattern: str, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        matches(pattern, NAME)
