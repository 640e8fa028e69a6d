"""What stands in the place of vLLM's LogitsProcessor in a draft with a vocabulary.

While drafts are chosen greedily (`choosing`) only the listed rows are multiplied, and tokens come
back instead of logits. Otherwise logits have the target's width, -inf where a token is not listed:
so drafts that are sampled, and the test against their probabilities, stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headstart.errors import ConfigError
from headstart.vllm_plugin.rows import DraftRows

Gather = Callable[[Tensor], Tensor]  # [rows, n] of each rank, side by side


def gather_ranks(part: Tensor) -> Tensor:
    from vllm.distributed import tensor_model_parallel_all_gather

    found: Tensor = tensor_model_parallel_all_gather(part, dim=-1)
    return found


class DraftLogits(nn.Module):
    """Called as a LogitsProcessor is: (lm_head, hidden_states)."""

    def __init__(
        self,
        stock: Any,
        ids: Sequence[int] | None,
        *,
        is_int8: bool = False,
        gather: Gather = gather_ranks,
    ):
        super().__init__()
        self.stock = stock
        self.scale = float(getattr(stock, "scale", 1.0))
        self.soft_cap = getattr(stock, "soft_cap", None)
        if self.scale <= 0:
            raise ConfigError(
                f"the model multiplies its logits by {self.scale}; a draft vocabulary needs a "
                "positive number. Draft without one."
            )
        self._ids, self._is_int8, self._gather = ids, is_int8, gather
        self._is_choosing = False
        # By object: a head with several modules may have several LM heads.
        self._rows: dict[int, tuple[Any, DraftRows]] = {}

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Within, a call gives tokens [rows] instead of logits."""
        self._is_choosing = True
        try:
            yield
        finally:
            self._is_choosing = False

    def forward(self, lm_head: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if any(arg is not None and arg is not False for arg in (*args, *kwargs.values())):
            raise ConfigError(
                "this class of vLLM's asks for logits in a way that a draft vocabulary has no "
                "answer to (a bias, or those of one rank). Draft without one."
            )
        rows = self.rows(lm_head, hidden_states)
        if self._is_choosing:
            return self._top_tokens(rows, lm_head, hidden_states)
        return self._whole_width(rows, lm_head, hidden_states)

    def get_top_tokens(self, lm_head: Any, hidden_states: Tensor) -> Tensor:
        return self._top_tokens(self.rows(lm_head, hidden_states), lm_head, hidden_states)

    def rows(self, lm_head: Any, hidden_states: Tensor) -> DraftRows:
        """Built at the first call: only then vLLM has put the target's LM head in its place."""
        found = self._rows.get(id(lm_head))
        if found is None:
            dtype = getattr(self.stock, "head_dtype", None) or hidden_states.dtype
            made = DraftRows(lm_head, self._ids, is_int8=self._is_int8, dtype=dtype)
            found = self._rows[id(lm_head)] = (lm_head, made)
        return found[1]

    @torch.inference_mode()  # in which the rows were made
    def refill(self) -> None:
        """After weights were loaded once more."""
        for head, rows in self._rows.values():
            # While vLLM loads a draft's layers again its LM head has no values; it is the
            # target's, and gets them back as they were.
            if not any(part.is_meta for part in head.parameters()):
                rows.refill()

    def _top_tokens(self, rows: DraftRows, lm_head: Any, hidden: Tensor) -> Tensor:
        is_alone = lm_head.tp_size == 1
        if is_alone and (found := rows.top_ids(hidden)) is not None:
            return found
        if not len(rows.ids):  # none of the listed tokens lies on this rank
            best = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
            chosen = torch.zeros_like(best, dtype=torch.int64)
        else:
            best, columns = self._shaped(rows.scores(hidden)).max(dim=-1)
            chosen = rows.ids[columns]
        if is_alone:
            return chosen
        # fp32 holds every id below 2**24; the first rank wins a tie, as the lowest id does.
        pairs = self._gather(torch.stack([best.float(), chosen.float()], dim=-1))
        by_rank = pairs.view(len(hidden), lm_head.tp_size, 2)
        winner = by_rank[..., 0].argmax(dim=-1, keepdim=True)
        return by_rank[..., 1].gather(-1, winner).squeeze(-1).to(torch.int64)

    def _whole_width(self, rows: DraftRows, lm_head: Any, hidden: Tensor) -> Tensor:
        scores = self._shaped(rows.scores(hidden))
        first = int(lm_head.shard_indices.org_vocab_start_index)
        width = int(lm_head.num_embeddings_per_partition)
        logits = scores.new_full((len(hidden), width), -torch.inf)
        logits.index_copy_(1, rows.ids - first, scores)
        if lm_head.tp_size > 1:
            logits = self._gather(logits)
        return logits[..., : self.stock.org_vocab_size]

    def _shaped(self, scores: Tensor) -> Tensor:
        if self.soft_cap is not None:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        return scores if self.scale == 1.0 else scores * self.scale
