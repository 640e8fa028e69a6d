"""Choices of tokens by compiled kernels, equal to those of the sampling package up to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headstart.backends.chooser import Chooser, RowLogprobs
from headstart.backends.numba import sampling as kernels
from headstart.backends.numba.adjusting import Settings
from headstart.backends.numba.settings import SettingsPacker
from headstart.backends.numba.thread_pool import POOL, new_counters
from headstart.sampling.params import Row, SamplingParams

_PER_TOKEN = 16  # what choosing among tokens costs, in products of `ThreadPool.run`

_PLAIN = Row(SamplingParams(logprobs=1), 0, 0)


class CompiledChooser(Chooser):
    """Float32 logits of a CPU."""

    def __init__(self, num_tokens: int):
        self.packer = SettingsPacker(num_tokens)
        self._num_tokens = num_tokens
        self._all = np.arange(num_tokens, dtype=np.int32)

    def warm_up(self) -> None:
        """Compile, or load what was compiled."""
        row, logits = _PLAIN, torch.zeros(2, self._num_tokens)
        self.choose(logits[:1], [row])
        self.reject(logits, [row, row], [0], self.draft_probs(logits[:1], [row], None, 0))
        self.logprobs(logits, [0], [0], [row])

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        return [int(column) for column in self._choose(logits, rows, self._all)[0]]

    def choose_drafts(
        self, logits: Tensor, rows: Sequence[Row], token_ids: Tensor | None
    ) -> list[int]:
        tokens = self._tokens_of(token_ids)
        columns, _ = self._choose(logits, rows, tokens, penalties=False)
        return [int(token) for token in tokens[np.maximum(columns, 0)]]

    def draft_probs(
        self, logits: Tensor, rows: Sequence[Row], token_ids: Tensor | None, num_tokens: int
    ) -> Tensor:
        tokens = self._tokens_of(token_ids)
        _, probs = self._choose(logits, rows, tokens, penalties=False, keeps_probs=True)
        return torch.from_numpy(probs)

    def _choose(
        self, logits: Tensor, rows: Sequence[Row], tokens: np.ndarray, *, penalties: bool = True,
        keeps_probs: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Columns, and what they were drawn from."""
        chosen = np.empty(len(rows), np.int64)
        probs = np.empty((len(rows), self._num_tokens if keeps_probs else 0), np.float32)
        POOL.run(
            self._work(len(rows)), kernels.choose_rows, new_counters(1), kernels.FIRST,
            logits.numpy(), self.packer.pack(rows, penalties=penalties), kernels.FIRST, tokens,
            probs, chosen,
        )  # fmt: skip
        return chosen, probs

    def reject(
        self, logits: Tensor, rows: Sequence[Row], drafts: Sequence[int], draft_probs: Tensor
    ) -> tuple[int, int]:
        accepted, following = kernels.reject(
            logits.numpy(), self.packer.pack(rows), self._all, np.array(drafts, np.int32),
            draft_probs.numpy(),
        )  # fmt: skip
        return int(accepted), int(following)

    def logprobs(
        self, logits: Tensor, at: Sequence[int], ids: Sequence[int], rows: Sequence[Row]
    ) -> list[RowLogprobs]:
        counts = [min(row.params.logprobs or 0, self._num_tokens) for row in rows]
        told = np.empty(len(rows), np.float32)
        best = np.empty((len(rows), max(counts)), np.int64)
        best_values = np.empty(best.shape, np.float32)
        POOL.run(
            self._work(len(rows)), kernels.tell_rows, new_counters(1), logits.numpy(),
            np.array(at), self._told_settings(rows), self._all,
            np.array([row.params.logprobs_mode == "processed" for row in rows]),
            np.maximum(np.array(ids), 0), told, best, best_values,
        )  # fmt: skip
        order = np.argsort(-best_values, axis=1, kind="stable")  # of equal ones the lowest id first
        ids_told, values_told = (np.take_along_axis(p, order, 1) for p in (best, best_values))
        return [
            (value, dict(zip(names[:count], numbers[:count], strict=True)))
            for value, names, numbers, count in zip(
                told.tolist(), ids_told.tolist(), values_told.tolist(), counts, strict=True
            )
        ]

    def _told_settings(self, rows: Sequence[Row]) -> Settings:
        """Raw log-probabilities depend on none."""
        if all(row.params.logprobs_mode == "raw" for row in rows):
            return self.packer.pack([_PLAIN] * len(rows))
        return self.packer.pack(rows)

    def _tokens_of(self, token_ids: Tensor | None) -> np.ndarray:
        return self._all if token_ids is None else token_ids.numpy().astype(np.int32)

    def _work(self, num_rows: int) -> int:
        """One row has nothing to share."""
        return 0 if num_rows == 1 else num_rows * self._num_tokens * _PER_TOKEN
