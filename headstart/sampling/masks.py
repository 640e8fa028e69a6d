"""Masks over tokens, as flags and as bits: words of 32 tokens, the lowest bit first."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def num_words(num_tokens: int) -> int:
    """Words that hold a bit for each token."""
    return -(-num_tokens // 32)


def packed(mask: Tensor) -> np.ndarray:
    """The bits of a mask, bool [V], as int32 [words]."""
    bits = np.packbits(mask.cpu().numpy(), bitorder="little")
    words = np.zeros(num_words(len(mask)), np.int32)
    words.view(np.uint8)[: len(bits)] = bits
    return words


def unpacked(words: np.ndarray, num_tokens: int) -> Tensor:
    """The mask, bool [V], that has these bits."""
    flags = np.unpackbits(words.view(np.uint8), count=num_tokens, bitorder="little")
    return torch.from_numpy(flags.view(np.bool_))


def has_token(words: np.ndarray, token: int) -> bool:
    """Whether a token's bit is set; one that there is no bit for is not allowed."""
    at = token >> 5
    return 0 <= at < len(words) and bool((int(words[at]) >> (token & 31)) & 1)


class TokenMask:
    """A mask in the form that it came in; the other form is made when it is first asked for."""

    def __init__(
        self, num_tokens: int, *, words: np.ndarray | None = None, flags: Tensor | None = None
    ):
        assert (words is None) != (flags is None)
        self._num_tokens, self._words, self._flags = num_tokens, words, flags

    @property
    def words(self) -> np.ndarray:
        if self._words is None:
            assert self._flags is not None
            self._words = packed(self._flags)
        return self._words

    @property
    def flags(self) -> Tensor:
        if self._flags is None:
            assert self._words is not None
            self._flags = unpacked(self._words, self._num_tokens)
        return self._flags

    def allows(self, token: int) -> bool:
        """Whether it has the token; one that there is no bit for is not allowed."""
        if self._words is not None:
            return has_token(self._words, token)
        assert self._flags is not None
        return 0 <= token < len(self._flags) and bool(self._flags[token])
