"""Maps: ids <-> d2t/t2d round trip, a pruned arg-max maps back, and what a vocabulary refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import DataError
from headstart.vocab.draft_vocab import DraftVocab, from_d2t, from_t2d, to_d2t, to_t2d

ids_of_any_kind = st.sets(st.integers(0, 99), min_size=1).map(sorted)


@given(ids_of_any_kind)
def test_maps_round_trip_between_ids_and_d2t_and_t2d(ids: list[int]) -> None:
    assert from_d2t(to_d2t(ids)) == ids
    assert from_t2d(to_t2d(ids, 100)) == ids
    assert len(to_t2d(ids, 100)) == 100


def test_d2t_holds_offsets_and_not_ids() -> None:
    """EAGLE-3's convention; a reader that takes them for ids is wrong from the first gap on."""
    assert to_d2t([0, 1, 5, 9]) == [0, 0, 3, 6]


@given(ids_of_any_kind, st.integers(0, 2**31))
def test_maps_lead_the_pruned_argmax_back_to_the_best_token_that_is_in(
    ids: list[int], seed: int
) -> None:
    weight = torch.randn(100, 8, generator=torch.Generator().manual_seed(seed))
    state = torch.randn(8, generator=torch.Generator().manual_seed(seed + 1))
    outside = torch.ones(100, dtype=torch.bool)
    outside[ids] = False
    best = (weight @ state).masked_fill(outside, float("-inf")).argmax()
    row = int((weight[torch.tensor(ids)] @ state).argmax())
    assert ids[row] == row + to_d2t(ids)[row] == best


def test_ids_come_in_any_order_and_are_kept_ascending() -> None:
    assert DraftVocab.of([7, 0, 3]).ids == (0, 3, 7)


REFUSED: dict[str, tuple[Any, str]] = {
    "empty": ({"ids": ()}, "'default' is empty"),
    "negative": ({"ids": (-1, 2)}, "holds -1; ids are 0 or up"),
    "not ascending": ({"ids": (3, 2)}, "ascending and unique"),
    "outside": ({"ids": (1, 8, 9, 30), "vocab_size": 8}, "holds 8, 9, 30; .* tokens 0 to 7"),
    "reserved name": ({"ids": (1,), "name": "full"}, "'full'; that stands for the whole"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_vocabulary_that_cannot_be_right_is_refused(case: str) -> None:
    fields, said = REFUSED[case]
    with pytest.raises(DataError, match=said):
        DraftVocab(**fields)


def test_an_id_that_is_there_twice_is_named() -> None:
    with pytest.raises(DataError, match="'zh' holds 4, 5 more than once"):
        DraftVocab.of([4, 5, 1, 5, 4], name="zh")


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "other size": ({"vocab_size": 64}, "for a vocabulary of 64 tokens; the model has 100"),
    "other tokenizer": ({"tokenizer_sha": "abc"}, r"another tokenizer \(abc, the model's is def"),
    "unknown size, too high": ({}, "holds 120; the model has tokens 0 to 99"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_vocabulary_of_another_model_is_refused(case: str) -> None:
    fields, said = MISMATCHES[case]
    vocab = DraftVocab(ids=(1, 2) if fields else (1, 120), **fields)
    with pytest.raises(DataError, match=said):
        vocab.check(vocab_size=100, tokenizer_sha="def")


def test_what_a_file_does_not_say_is_not_held_against_it() -> None:
    DraftVocab(ids=(1, 99)).check(vocab_size=100, tokenizer_sha="def")
    DraftVocab(ids=(1,), tokenizer_sha="abc").check(vocab_size=100, tokenizer_sha=None)
