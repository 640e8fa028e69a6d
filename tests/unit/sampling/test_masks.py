"""Masks as flags and as bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headstart.sampling.masks import num_words, packed, unpacked


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 130])
def test_bits_are_those_of_the_flags_and_back(num_tokens: int) -> None:
    draw = torch.Generator().manual_seed(num_tokens)
    mask = torch.rand(num_tokens, generator=draw) < 0.5
    words = packed(mask)
    assert words.dtype == np.int32 and words.shape == (num_words(num_tokens),)
    for token, is_allowed in enumerate(mask.tolist()):
        assert (int(words[token // 32]) >> (token % 32)) & 1 == is_allowed
    assert unpacked(words, num_tokens).tolist() == mask.tolist()
