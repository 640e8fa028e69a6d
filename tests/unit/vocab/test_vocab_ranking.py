"""Ranking: what is counted, what wins, what it covers; and the choice of a size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import ConfigError, DataError
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.making import Group, Model, Prediction, grouped, make
from headstart.vocab.ranking import (
    answer_ids,
    by_category,
    by_language,
    count,
    count_text,
    coverage,
    merged,
    pieces,
    rank,
    together,
)
from headstart.vocab.sizes import SizeResult, candidate_sizes, choose_size


@dataclass
class Answer:
    ids: Sequence[int]
    mask: Sequence[int]
    category: str = ""


def answered(prompt: Sequence[int], *ids: int, category: str = "") -> Answer:
    return Answer([*prompt, *ids], [0] * len(prompt) + [1] * len(ids), category)


WORDS = {10: "hello ", 11: "world ", 20: "你", 21: "好"}


def decode(ids: list[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def test_only_what_the_model_wrote_is_counted() -> None:
    answers = [answered([1, 2, 2], 10, 11), Answer([10, 3, 11], [1, 0, 1])]
    assert count(answers, together) == {"all": Counter({10: 2, 11: 2})}
    assert answer_ids(answers[1]) == [10, 11]


def test_answers_are_grouped_by_their_own_language_and_not_the_prompts() -> None:
    answers = [answered([20, 21], 10, 11, 10), answered([10], 20, 21)]
    assert count(answers, by_language(decode)) == {
        "en": Counter({10: 2, 11: 1}), "zh": Counter({20: 1, 21: 1}),
    }  # fmt: skip


def test_answers_are_grouped_by_label_on_request() -> None:
    answers = [answered([], 1, category="math"), answered([], 2), answered([], 3, category="math")]
    assert set(count(answers, by_category)) == {"math", "all"}


def test_text_is_counted_in_pieces_that_have_their_own_language() -> None:
    text = "hello world\n" * 400 + "你好\n" * 1500
    found = count_text(text, lambda piece: [len(piece)], lambda piece: piece[0])
    assert set(found) == {"h", "你"}
    assert "".join(pieces(text)) == text
    assert merged({"a": Counter([1])}, {"a": Counter([1, 2]), "b": Counter([3])}) == {
        "a": Counter({1: 2, 2: 1}), "b": Counter({3: 1}),
    }  # fmt: skip


def test_forced_tokens_come_first_then_the_most_frequent_and_ties_go_to_the_lowest_id() -> None:
    counts = {5: 9, 6: 3, 7: 3, 8: 3, 2: 1}
    chosen = rank(counts, size=5, forced=frozenset([0, 31]), vocab_size=32)
    assert chosen == (0, 5, 6, 7, 31)


@given(
    st.dictionaries(st.integers(0, 49), st.integers(0, 5)),
    st.frozensets(st.integers(0, 49), max_size=10),
    st.integers(10, 50),
)
def test_no_other_set_of_that_size_with_the_forced_tokens_covers_more(
    counts: dict[int, int], forced: frozenset[int], size: int
) -> None:
    chosen = rank(counts, size=size, forced=forced, vocab_size=50)
    assert len(chosen) == size and forced <= set(chosen) and list(chosen) == sorted(set(chosen))
    left = [counts.get(token, 0) for token in range(50) if token not in chosen]
    taken = [counts.get(token, 0) for token in chosen if token not in forced]
    assert max(left, default=0) <= min(taken, default=9)


def test_a_size_that_cannot_be_is_refused() -> None:
    forced = frozenset(range(6))
    with pytest.raises(ConfigError, match=r"--size is 5; 6 tokens .* Give at least 6"):
        rank({}, size=5, forced=forced, vocab_size=32)
    with pytest.raises(ConfigError, match="--size is 33; the model has 32 tokens"):
        rank({}, size=33, forced=forced, vocab_size=32)


def test_coverage_is_the_share_of_tokens_and_not_of_kinds() -> None:
    assert coverage([1, 2], {1: 6, 3: 2}) == 0.75
    assert coverage([1, 2], {}) is None


def test_small_groups_get_no_map_of_their_own_but_count_in_the_one_for_all() -> None:
    counts = {"en": Counter({1: 90, 2: 20}), "zh": Counter({20: 5})}
    held = [answered([], 1, category="en"), answered([], 20, category="zh")]
    groups, notes = grouped(counts, held, by_category, min_tokens=100)
    assert [(g.name, g.num_counted, len(g.heldout)) for g in groups] == [
        ("en", 110, 1), ("all", 115, 2),
    ]  # fmt: skip
    assert notes == ["zh: 5 answer tokens are too few for a map of its own (--min-tokens)"]
    alone, _ = grouped({"en": counts["en"]}, held, by_category, min_tokens=100)
    assert [g.name for g in alone] == ["en"]
    with pytest.raises(DataError, match="no answer tokens to count"):
        grouped({}, [], by_category, min_tokens=1)


MODEL = Model(vocab_size=32, tokenizer_sha="abc", forced=frozenset([0, 1]))
GROUP = Group("en", Counter({5: 9, 6: 5, 7: 1}), (answered([9], 5, 5, 6, 8),))


def test_coverage_is_measured_on_held_out_answers() -> None:
    made = make(GROUP, MODEL, [4], None)
    assert made.vocab == DraftVocab(
        ids=(0, 1, 5, 6), name="en", language="en", vocab_size=32, tokenizer_sha="abc",
        coverage=0.75, forced=2,
    )  # fmt: skip
    assert made.as_json()["candidates"][0]["acceptance_length"] is None


def test_every_size_is_simulated_on_the_groups_own_answers_and_the_fastest_is_taken() -> None:
    asked: list[Any] = []

    def simulate(vocab: DraftVocab, answers: Sequence[Any]) -> Prediction:
        asked.append((len(vocab.ids), answers))
        return Prediction(2.0, {3: 1.4, 4: 1.7, 8: 1.6}[len(vocab.ids)])

    made = make(GROUP, MODEL, [3, 4, 8], simulate)
    assert len(made.vocab.ids) == 4
    assert [size for size, _ in asked] == [3, 4, 8]
    assert all(answers == GROUP.heldout for _, answers in asked)
    assert [c.predicted_speed for c in made.candidates] == [1.4, 1.7, 1.6]


def test_answers_of_another_model_are_refused() -> None:
    with pytest.raises(DataError, match="hold token 40; the model has tokens 0 to 31"):
        make(Group("en", Counter({40: 1})), MODEL, [4], None)


def speeds(*values: float | None) -> list[SizeResult]:
    return [
        SizeResult(size=size, coverage=0.9, predicted_speed=speed)
        for size, speed in zip((32, 8, 16), values, strict=True)
    ]


def test_the_fastest_size_is_chosen_and_the_smaller_of_two() -> None:
    assert choose_size(speeds(1.5, 1.9, 1.7)).size == 8
    assert choose_size(speeds(1.9, 1.7, 1.9)).size == 16


def test_without_predictions_the_smallest_size_that_covers_enough_is_chosen() -> None:
    def sized(*shares: float | None) -> list[SizeResult]:
        sizes = zip((8, 16, 32), shares, strict=True)
        return [SizeResult(size=size, coverage=share) for size, share in sizes]

    assert choose_size(sized(0.9, 0.991, 0.999)).size == 16
    assert choose_size(sized(0.5, 0.6, 0.7)).size == 32
    with pytest.raises(ConfigError, match=r"no held-out answers .* give --size"):
        choose_size(sized(None, None, None))


def test_where_drafting_does_not_pay_coverage_decides_and_a_note_says_so() -> None:
    """Every size was 1.00 times as fast, at K = 0, and the smallest was taken, of little use."""
    flat = [
        SizeResult(size=size, coverage=share, predicted_speed=1.0, drafts=0, acceptance_length=1.0)
        for size, share in ((8, 0.5), (16, 0.995), (32, 1.0))
    ]
    assert choose_size(flat).size == 16
    made = make(GROUP, MODEL, [4, 8], lambda vocab, held: Prediction(1.0, 1.0, 0))
    assert made.note is not None and "drafts do not pay" in made.note
    paid = make(GROUP, MODEL, [4, 8], lambda v, held: Prediction(2.0, 1 + len(v.ids) / 100, 3))
    assert paid.note is None and len(paid.vocab.ids) == 8
    assert paid.as_json()["candidates"][0]["drafts"] == 3


def test_sizes_with_and_without_a_prediction_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="for some sizes only"):
        choose_size(speeds(1.5, None, 1.7))
    with pytest.raises(ConfigError, match="no sizes to choose from"):
        choose_size([])


def test_sizes_to_try_fit_the_model() -> None:
    assert candidate_sizes(151_680, 900) == (8_000, 16_000, 32_000, 64_000)
    assert candidate_sizes(49_152, 9_000) == (16_000,)
    assert candidate_sizes(64, 10) == (16, 32)
    with pytest.raises(ConfigError, match="40 of the 64 tokens must be in"):
        candidate_sizes(64, 40)
