"""Copies from texts, found by looking through all of them, and texts to look through."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from headstart.copying.answers import ANSWER_MATCH
from headstart.copying.drafts import Copy
from headstart.copying.index import MIN_MATCH, Match


def scanned(tokens: list[int], least: int = MIN_MATCH) -> Match | None:
    """The longest end of the text that occurs earlier, and its latest place."""
    for length in range(len(tokens) - 1, least - 1, -1):
        end = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == end:
                return Match(length, start + length)
    return None


def scanned_answers(
    tokens: list[int], answers: Sequence[list[int]]
) -> tuple[Match, list[int]] | None:
    """The latest answer that has the end of the text and goes on after it, at its latest place."""
    for answer in reversed(answers):
        for place in range(len(answer) - 1, 0, -1):
            length = 0
            while (
                length < min(place, len(tokens))
                and answer[place - 1 - length] == tokens[-1 - length]
            ):
                length += 1
            if length >= ANSWER_MATCH:
                return Match(length, place), answer
    return None


def scanned_copy(
    tokens: list[int], answers: Sequence[list[int]] = (), count: int = 16
) -> Copy | None:
    """What followed at the text's longest match, or in an answer that agrees with more of it."""
    match, source = scanned(tokens), tokens
    found = scanned_answers(tokens, answers)
    if found is not None and (match is None or found[0].length > match.length):
        match, source = found
    if match is None:
        return None
    following = source[match.place :]
    repeated = following * count  # behind the end of where it comes from
    return Copy(repeated[:count], match.length)


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Random tokens, among them copies of what came before, some of them changed."""
    made = draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(made) - 1))
        piece = made[start : start + draw(st.integers(1, 12))]
        made = [*made, *piece, *draw(st.lists(st.integers(0, 5), max_size=3))]
    return made


@st.composite
def texts_with_answers(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """A text, and answers that have a piece of it."""
    text, answers = draw(texts()), list[list[int]]()
    some = st.lists(st.integers(0, 5), max_size=12)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text) - 1))
        answers.append([*draw(some), *text[start : start + draw(st.integers(8, 40))], *draw(some)])
    return text, answers
