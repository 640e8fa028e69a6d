"""Kinds of requests: what programs ask is told apart, what people ask is not."""

from __future__ import annotations

import pytest

from headstart.learn import kinds as module
from headstart.learn.kinds import OTHER, Kinds, opening_of
from headstart.learn.reading import most_common


def test_an_opening_that_comes_often_is_a_kind() -> None:
    kinds = Kinds()
    found = [kinds.kind_of(f"Translate this passage: {i}") for i in range(6)]
    assert found == [OTHER] * 3 + ["translate this passage"] * 3


def test_openings_of_people_are_one_kind_and_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST", 512)
    kinds = Kinds()
    found = {kinds.kind_of(f"word{i} word{i + 1} word{i + 2}") for i in range(5000)}
    assert found == {OTHER} and len(kinds._counts) <= 512
    often = [kinds.kind_of("Translate this passage") for _ in range(4)]
    assert often[-1] == "translate this passage", "one that comes often is found among them"


def test_a_rare_kind_is_found_among_the_openings_of_people() -> None:
    """Regression: what came once in a thousand requests stayed among all others, and was lost."""
    kinds = Kinds()
    found = [
        kinds.kind_of("Write unit tests for this" if i % 1000 == 0 else f"word{i} b c")
        for i in range(6001)
    ]
    assert found.count("write unit tests") == 4


def test_kinds_of_kept_texts_are_known_after_a_restart() -> None:
    kinds = Kinds()
    kinds.know(["write unit tests", OTHER])
    assert kinds.kind_of("Write unit tests!") == "write unit tests"
    assert most_common([]) == []


def test_the_last_message_of_a_user_counts() -> None:
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "First thing"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": [{"type": "text", "text": "Now, please go on"}]},
    ]
    assert opening_of(chat) == "now please go"
    assert opening_of([1, 2, 3]) == "" and opening_of([]) == "" and opening_of("  ") == ""
