"""Kinds of requests: what programs ask is told apart, what people ask is not."""

from __future__ import annotations

from headstart.learn.kinds import OTHER, Kinds, opening_of


def test_an_opening_that_comes_often_is_a_kind() -> None:
    kinds = Kinds()
    found = [kinds.kind_of(f"Translate this passage: {i}") for i in range(6)]
    assert found == [OTHER] * 3 + ["translate this passage"] * 3


def test_openings_of_people_are_one_kind_and_take_bounded_memory() -> None:
    kinds = Kinds()
    found = {kinds.kind_of(f"word{i} word{i + 1} word{i + 2}") for i in range(5000)}
    assert found == {OTHER} and len(kinds._counts) <= 512
    often = [kinds.kind_of("Translate this passage") for _ in range(4)]
    assert often[-1] == "translate this passage", "one that comes often is found among them"


def test_the_last_message_of_a_user_counts() -> None:
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "First thing"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": [{"type": "text", "text": "Now, please go on"}]},
    ]
    assert opening_of(chat) == "now please go"
    assert opening_of([1, 2, 3]) == "" and opening_of([]) == "" and opening_of("  ") == ""
