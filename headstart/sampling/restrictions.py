"""Bias, allowed and banned tokens of a request as arrays, which backends read in place of lists."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np


class Restrictions:
    """Made once per request: lists may hold a whole vocabulary."""

    def __init__(
        self,
        bias: Mapping[int, float],
        allowed: Collection[int] | None,
        banned: Collection[int],
    ):
        self.biased, self.banned = _ids(bias), _ids(banned)
        self.amounts = np.fromiter(bias.values(), np.float32, len(bias))
        self.allowed = None if allowed is None else _ids(allowed)
        self._row: np.ndarray | None = None

    def row(self, num_tokens: int) -> np.ndarray:
        """float32 [num_tokens] to add to logits: biases, and -inf for what may not be chosen."""
        if self._row is None or len(self._row) != num_tokens:
            self._row = np.full(num_tokens, 0 if self.allowed is None else -np.inf, np.float32)
            if self.allowed is not None:
                self._row[self.allowed] = 0
            self._row[self.biased] += self.amounts
            self._row[self.banned] = -np.inf
        return self._row


def _ids(tokens: Collection[int]) -> np.ndarray:
    return np.fromiter(tokens, np.int32, len(tokens))
