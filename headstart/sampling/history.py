"""Tokens of one request, counted as they come: what penalties look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class History:
    """Distinct tokens of prompt and output, and how often each is in the output."""

    def __init__(self, prompt_ids: Sequence[int]):
        distinct = np.unique(np.array(prompt_ids, np.int32))
        self._ids, self._counts = distinct, np.zeros(len(distinct), np.float32)
        self._size = len(distinct)
        self._places = {int(token): place for place, token in enumerate(distinct)}
        self.num_output = 0

    @classmethod
    def of(cls, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> History:
        history = cls(prompt_ids)
        history.add(output_ids)
        return history

    def add(self, output_ids: Sequence[int]) -> None:
        """Count what came next in the output."""
        for token in output_ids:
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = self._append(token)
            self._counts[place] += 1
        self.num_output += len(output_ids)

    def _append(self, token: int) -> int:
        if self._size == len(self._ids):
            self._ids = np.resize(self._ids, 2 * self._size + 16)
            self._counts = np.resize(self._counts, len(self._ids))
        self._ids[self._size], self._counts[self._size] = token, 0
        self._size += 1
        return self._size - 1

    @property
    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32, and how often each is in the output, float32; 0: in the prompt alone."""
        return self._ids[: self._size], self._counts[: self._size]
