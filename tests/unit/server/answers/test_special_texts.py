"""Special tokens are taken out of a text, and words that only look like them are not."""

from __future__ import annotations

import pytest

from headstart.server.answers.chat_text import WithoutSpecial

TEXTS = {1: "<s>", 2: "<|user|>"}


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([([7], "a<s>b")], "a<s>b"),
        ([([1], "<s>"), ([7], "a")], "a"),
        ([([7, 1, 7], "a<s>b<s>")], "ab<s>"),
        ([([1, 2], "x<"), ([7], "s><|us"), ([7], "er|>y")], "xy"),
        ([([1], "x<"), ([7], "b")], "x<b"),
        ([([1], "x<")], "x<"),
    ],
)
def test_what_goes_and_what_stays(parts: list[tuple[list[int], str]], kept: str) -> None:
    text = WithoutSpecial(TEXTS)
    assert "".join(text.feed(*part) for part in parts) + text.finish() == kept
