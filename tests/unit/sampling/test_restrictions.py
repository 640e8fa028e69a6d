"""Lists of tokens as arrays: what they say, and that they are made once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headstart.sampling.params import Row, SamplingParams
from headstart.sampling.processors import adjust

VOCAB = 40
CASES = {
    "bias": SamplingParams(logit_bias={3: 1.5, 7: -0.3}),
    "allowed": SamplingParams(allowed_token_ids=(5, 1, 5, 9)),
    "banned": SamplingParams(banned_token_ids=(0, 39)),
    "all": SamplingParams(
        logit_bias={1: 2.0, 2: -1.0, 9: 100}, allowed_token_ids=(9, 2, 1), banned_token_ids=(9,)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_added_to_logits_is_what_the_reference_makes_of_the_lists(name: str) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    wanted = adjust(logits, [Row(CASES[name], 0, 0)])
    assert torch.equal(logits + torch.from_numpy(CASES[name].restrictions.row(VOCAB)), wanted)


def test_arrays_and_row_are_made_once() -> None:
    params = CASES["all"]
    assert params.restrictions is params.restrictions
    assert params.restrictions.row(VOCAB) is params.restrictions.row(VOCAB)
    assert np.isfinite(params.restrictions.row(VOCAB)).sum() == 2
    assert len(params.restrictions.row(VOCAB + 1)) == VOCAB + 1, "another model's vocabulary"


def test_parameters_without_lists_are_not_restricted() -> None:
    assert not SamplingParams().is_restricted
    assert not SamplingParams(logit_bias={}, banned_token_ids=()).is_restricted
    assert all(params.is_restricted for params in CASES.values())
    assert math.isinf(SamplingParams(banned_token_ids=(4,)).restrictions.row(VOCAB)[4])
