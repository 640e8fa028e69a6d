"""The index against a plain scan of the text."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.text_copies import scanned, scanned_copy, texts, texts_with_answers

from headstart.copying.answers import (
    ANSWER_MATCH,
    MEAN_OF_ANSWERS,
    MOST_OF_ANSWER,
    AnswerStore,
)
from headstart.copying.drafts import MAX_COPIED, copy_after
from headstart.copying.index import Match, TextIndex, continued


@settings(deadline=None)  # other processes may take the core
@given(texts())
def test_every_match_is_the_longest_one_at_its_latest_place(tokens: list[int]) -> None:
    index = TextIndex()
    for end, token in enumerate(tokens, 1):
        index.extend([token])
        assert index.match() == scanned(tokens[:end])
        assert index.match(least=1) == scanned(tokens[:end], least=1)
    assert TextIndex(tokens).match() == index.match()  # at once, or token by token
    assert len(index) == len(tokens)


def test_a_text_that_repeats_itself_for_ever_is_matched_whole_and_costs_no_more() -> None:
    index = TextIndex([7, *[1, 2, 3] * 2000])
    match = index.match()
    assert match is not None and match.length == 3 * 1999
    assert index.following(match.place, 5) == [1, 2, 3, 1, 2]  # behind the end of the text
    assert index.num_states < 2 * len(index)


def test_ends_of_long_random_texts_are_found_where_they_were_planted() -> None:
    numbers = random.Random(0)
    index, text = TextIndex(), [numbers.randrange(1 << 17) for _ in range(20_000)]
    index.extend(text)
    assert index.match() is None
    for place in (0, 4_321, 19_000):
        index.extend(text[place : place + 9])
        assert index.match() == Match(9, place + 9)
        index.extend([1 << 20])


def test_what_follows_repeats_a_copy_that_reaches_its_own_end() -> None:
    assert continued([1, 2, 3, 4], 2, 5) == [3, 4, 3, 4, 3]
    assert continued([1, 2, 3, 4], 0, 2) == [1, 2]
    assert continued([1, 2], 2, 3) == []


@given(st.lists(st.lists(st.integers(0, 1), max_size=40), max_size=8), st.integers(1, 4))
def test_answers_are_found_while_they_are_kept(answers: list[list[int]], most: int) -> None:
    store, kept = AnswerStore(most), list[list[int]]()
    for answer in answers:
        store.add(b"me", answer)
        kept = [*kept, answer][-most:] if len(answer) > ANSWER_MATCH else kept
    assert len(store) == len(kept)
    ends = {
        tuple(answer[end - ANSWER_MATCH : end])
        for answer in kept for end in range(ANSWER_MATCH, len(answer))
    }  # fmt: skip
    for answer in answers:
        for end in range(ANSWER_MATCH, len(answer)):
            text = answer[:end]
            found = store.find(b"me", text)
            assert (found is not None) == (tuple(text[-ANSWER_MATCH:]) in ends)
            if found is not None:
                before = list(found.tokens[found.place - found.length : found.place])
                assert before == text[-found.length :] and found.place < len(found.tokens)
    assert store.find(b"other", [0] * ANSWER_MATCH) is None


def test_an_answer_that_is_used_stays_longer() -> None:
    store = AnswerStore(2)
    first, second, third = ([start + i for i in range(20)] for start in (0, 100, 200))
    store.add(b"", first)
    store.add(b"", second)
    assert store.find(b"", first[:10]) is not None
    store.add(b"", third)
    assert store.find(b"", first[:10]) is not None
    assert store.find(b"", second[:10]) is None


def test_long_answers_are_kept_in_part_and_fewer_of_them() -> None:
    """Regression: the bound was one of answers, however long they were."""
    size = MOST_OF_ANSWER + 100
    store, long = AnswerStore(4), [list(range(start, start + size)) for start in (0, 10**5, 10**6)]
    for answer in long[:2]:
        store.add(b"", answer)
    assert store.find(b"", long[0][:50]) is None and store.find(b"", long[0][100:150]) is not None
    assert len(store) == 2 and store._num_tokens == 4 * MEAN_OF_ANSWERS
    store.add(b"", long[2])  # the second one was used less recently
    assert len(store) == 2 and len(store._runs) == 2 * (MOST_OF_ANSWER - ANSWER_MATCH)
    assert [store.find(b"", each[-50:-1]) is not None for each in long] == [True, False, True]
    lone = AnswerStore(1)
    lone.add(b"", long[0])
    assert len(lone) == 1 and lone._num_tokens == MEAN_OF_ANSWERS


@given(texts_with_answers(), st.integers(1, MAX_COPIED))
def test_a_copy_is_what_looking_through_text_and_answers_finds(
    given_texts: tuple[list[int], list[list[int]]], count: int
) -> None:
    tokens, answers = given_texts
    store, index = AnswerStore(4), TextIndex(tokens)
    for answer in answers:
        store.add(b"", answer)
    assert copy_after(index, count=count) == scanned_copy(tokens, count=count)
    found = copy_after(index, answers=store, count=count)
    assert found == scanned_copy(tokens, answers, count)


def test_the_longer_match_is_copied() -> None:
    answers = AnswerStore(4)
    answers.add(b"", [*range(50, 60), 1, 2, 3, 4, 77, 78])
    text = TextIndex([2, 3, 4, 9, *range(50, 60), 1, 2, 3, 4])
    own = copy_after(text)
    assert own is not None and (own.length, own.tokens[0]) == (3, 9)
    assert len(own.tokens) == MAX_COPIED
    better = copy_after(text, answers=answers)
    assert better is not None and (better.length, better.tokens[:2]) == (14, [77, 78])
    assert better.num_right([77, 78, 5]) == 2 and better.num_right([77]) == 1


def test_where_both_matches_are_as_long_the_text_itself_is_copied() -> None:
    answers = AnswerStore(4)
    answers.add(b"", [*range(50, 64), 77, 78])
    same = copy_after(TextIndex([*range(50, 64), 9, *range(50, 64)]), answers=answers)
    assert same is not None and (same.length, same.tokens[0]) == (14, 9)
