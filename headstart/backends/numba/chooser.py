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

# Cost per token in units of `ThreadPool.run`: exp of every token for a choice; the same for
# log-probabilities; no exp (greedy, top-k, min-p).
_PER_TOKEN, _PER_TOKEN_LOGPROBS, _PER_TOKEN_CUT = 12, 10, 5

_PLAIN = Row(SamplingParams(logprobs=1), 0, 0)


class CompiledChooser(Chooser):
    """Float32 logits of a CPU."""

    def __init__(self, num_tokens: int):
        self.packer = SettingsPacker(num_tokens)
        self._num_tokens = num_tokens
        self._all = np.arange(num_tokens, dtype=np.int32)
        self._plain: dict[int, Settings] = {}  # by number of rows

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
            self._work(rows), kernels.choose_rows, new_counters(1), kernels.FIRST,
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
        logprobs = np.empty(len(rows), np.float32)
        best = np.empty((len(rows), max(counts)), np.int64)
        best_values = np.empty(best.shape, np.float32)
        POOL.run(
            self._work(rows, for_logprobs=True), kernels.logprobs_of_rows, new_counters(1),
            logits.numpy(), np.array(at), self._logprob_settings(rows), self._all,
            np.array([row.params.logprobs_mode == "processed" for row in rows]),
            np.maximum(np.array(ids), 0), logprobs, best, best_values,
        )  # fmt: skip
        return [
            (value, _ranked(names, numbers, count))
            for value, names, numbers, count in zip(
                logprobs.tolist(), best.tolist(), best_values.tolist(), counts, strict=True
            )
        ]

    def _logprob_settings(self, rows: Sequence[Row]) -> Settings:
        """Raw log-probabilities depend on none."""
        if any(row.params.logprobs_mode == "processed" for row in rows):
            return self.packer.pack(rows)
        if len(rows) not in self._plain:
            self._plain[len(rows)] = self.packer.pack([_PLAIN] * len(rows))
        return self._plain[len(rows)]

    def _tokens_of(self, token_ids: Tensor | None) -> np.ndarray:
        return self._all if token_ids is None else token_ids.numpy().astype(np.int32)

    def _work(self, rows: Sequence[Row], *, for_logprobs: bool = False) -> int:
        """One row has nothing to share."""
        if len(rows) == 1:
            return 0
        return self._num_tokens * sum(
            _per_token(row.params, for_logprobs=for_logprobs) for row in rows
        )


def _per_token(params: SamplingParams, *, for_logprobs: bool) -> int:
    if for_logprobs and (params.logprobs_mode == "raw" or params.is_greedy):
        return _PER_TOKEN_LOGPROBS
    is_cut = params.top_k > 0 or (params.top_p == 1 and params.min_p > 0)
    return _PER_TOKEN_CUT if params.is_greedy or is_cut else _PER_TOKEN


def _ranked(ids: list[int], values: list[float], count: int) -> dict[int, float]:
    """The best ones in order, of equal ones the lowest id first, as they come."""
    order = sorted(range(len(ids)), key=values.__getitem__, reverse=True)
    return {ids[i]: values[i] for i in order[:count]}
