"""LM-head rows of the tokens that a request drafts beside its draft vocabulary, on a CPU.

Each request has a small matrix of its own, in the format of the LM head that the rows are copied
from. A row is copied when its token joins; what is there stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headstart.backends.numba.calls import FIELDS, OUTPUTS
from headstart.backends.numba.choice import OwnColumns, num_own_phases
from headstart.backends.numba.linear import Packed
from headstart.vocab.own_tokens import OwnTokens

_LEAST_ROWS = 64  # that there is room for; as many again when they are full


class OwnRows:
    """The rows of one request and one LM head, and where its tokens stand among a list's."""

    def __init__(self, lm_head: Packed, listed: np.ndarray):
        self._lm_head, self._listed = lm_head, listed
        self.matrix = lm_head.blank_rows(_LEAST_ROWS)
        self._num_written = 0
        self._hold(np.empty(0, np.int32))

    def _hold(self, ids: np.ndarray) -> None:
        """New arrays: a thread that is late may still read the old ones."""
        self.ids = ids
        self.order = np.argsort(ids).astype(np.int32)
        self.places = np.searchsorted(self._listed, ids[self.order])

    def follow(self, own: OwnTokens) -> None:
        """Copy the rows of tokens that have joined since the last time."""
        new = dict.fromkeys(own.written[self._num_written :])
        if not new:
            return
        self._num_written = len(own.written)
        while self.matrix.shape[0] < len(own.ids):
            larger = self._lm_head.blank_rows(2 * self.matrix.shape[0])
            larger.copy_rows(self.matrix, range(len(self.ids)), range(len(self.ids)))
            self.matrix = larger
        self.matrix.copy_rows(self._lm_head, [own.ids[slot] for slot in new], list(new))
        self._hold(np.array(own.ids, np.int32))

    def fields(self) -> list[int]:
        """The rows in use as a matrix that kernels read."""
        fields = self.matrix.fields()
        fields[OUTPUTS] = len(self.ids)
        return fields

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[n, tokens] of states, by slot."""
        return self.matrix.multiplied(normed)[:, : len(self.ids)]


@dataclass(frozen=True)
class OwnOfBatch:
    """What kernels read of some requests' rows, and the modules that hold it."""

    columns: OwnColumns
    held: tuple[Packed, ...] = ()

    def num_phases(self, requests: int) -> int:
        """That a depth of so many requests takes beside those without such rows."""
        return int(num_own_phases(requests, self.columns))

    @classmethod
    def of(cls, each: Sequence[OwnRows | None], depths: int) -> OwnOfBatch:
        """For chains of so many drafts; None: a request without such rows."""
        counts = [0 if own is None else len(own.ids) for own in each]
        shape = (len(each), max(counts, default=0))
        matrices = np.zeros((len(each), FIELDS), np.int64)
        ids, order = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        places = np.zeros(shape, np.int64)
        for row, (own, count) in enumerate(zip(each, counts, strict=True)):
            if own is not None:
                matrices[row] = own.fields()
                ids[row, :count], order[row, :count] = own.ids, own.order
                places[row, :count] = own.places
        columns = OwnColumns(
            np.array(counts, np.int64), matrices, ids, order, places,
            np.empty((depths, *shape), np.float32),
        )  # fmt: skip
        return cls(columns, tuple(own.matrix for own in each if own is not None))
