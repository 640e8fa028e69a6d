"""Log-probabilities of rows on their way to the host, which does not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.sampling.choose import TokenLogprob, logprobs


@dataclass(frozen=True)
class RowScores:
    """Of one token per row, and of the best ones at its place."""

    values: Tensor  # [rows]
    best_ids: Tensor  # [rows, top]
    best: Tensor
    ready: torch.cuda.Event | None = None  # when they have arrived

    @classmethod
    def of_rows(cls, logits: Tensor, ids: Tensor, top: int, *, one_by_one: bool) -> RowScores:
        """Of one token `ids` [rows] in each row of logits, and of the `top` best."""
        rows = [slice(i, i + 1) for i in range(len(ids))] if one_by_one else [...]
        parts = [logprobs(logits[own], ids[own], top, "raw", ()) for own in rows]
        values, best_ids, best = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls.sent(values, best_ids, best)

    @classmethod
    def sent(cls, values: Tensor, best_ids: Tensor, best: Tensor) -> RowScores:
        """Begin to copy them; whatever is launched next need not wait."""
        found = cls(to_host(values), to_host(best_ids), to_host(best))
        if not values.is_cuda:
            return found
        ready = torch.cuda.Event()
        ready.record()
        return replace(found, ready=ready)

    def of(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """The rows' entries; `tokens` are those that the scores were asked for."""
        if self.ready is not None:
            self.ready.synchronize()
        columns = self.values.tolist(), self.best_ids.tolist(), self.best.tolist()
        return [
            TokenLogprob(token, value, dict(zip(names, best, strict=True)))
            for token, value, names, best in zip(tokens, *columns, strict=True)
        ]


def to_host(values: Tensor) -> Tensor:
    """A copy in pinned memory, under way."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
