"""The feed-forward part of a layer: a gated MLP, or a mixture of experts.

A router chooses a few experts for each row, and weighs what they give. Rows are sorted by expert,
so that an expert's weights are read once per batch, however many rows chose it. A row's sum runs
over its experts in the order in which they were chosen, whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.nn.functional import linear, silu, softplus

from headstart.errors import ShapeMismatch
from headstart.models.linear import PRODUCTS, Linear, Stack
from headstart.models.moe_config import Limit, MoeConfig


class MLP(nn.Module):
    """SwiGLU with gate and up in one product."""

    def __init__(self, hidden: int, width: int, *, bias: bool = False, limit: Limit | None = None):
        super().__init__()
        self.limit = limit
        self.gate_up = Linear(hidden, 2 * width, bias=bias)
        self.down = Linear(width, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result = self.down(gated(gate, up, self.limit))
        assert isinstance(result, torch.Tensor)
        return result


def gated(gate: torch.Tensor, up: torch.Tensor, limit: Limit | None = None) -> torch.Tensor:
    """silu(gate) * up, without a third tensor where no gradient needs it; each within a limit."""
    if limit is not None:
        most, up = limit.most, up.clamp(-limit.most, limit.most)
        if limit.is_before:
            return silu(gate.clamp(max=most)) * up
        return silu(gate).clamp(max=most) * up
    return silu(gate) * up if gate.requires_grad else silu(gate).mul_(up)


class Router(nn.Module):
    """Scores in at least fp32, and the experts that they choose."""

    correction: torch.Tensor | None
    by_token: torch.Tensor | None

    def __init__(self, config: MoeConfig, hidden: int, *, vocab: int = 0):
        """`vocab`: of a model whose table says which experts a token has."""
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden), requires_grad=False)
        # Not trained: it steers how often an expert is chosen, and no gradient reaches it.
        bias = torch.empty(config.num_experts) if config.correction and not vocab else None
        self.register_buffer("correction", bias)
        table = torch.empty(vocab, config.top_k, dtype=torch.int64) if vocab else None
        self.register_buffer("by_token", table)
        self.one_by_one = False  # set by models/exact.py

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Both stay in fp32 when the model does not: near ties decide which experts run."""
        nn.Module._apply(self, fn, recurse)
        self.weight.data = _wide(self.weight.data)
        if self.correction is not None:
            self.correction = _wide(self.correction)
        return self

    def forward(
        self, x: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> chosen experts and their weights, [T, top_k] each."""
        config = self.config
        product = PRODUCTS["single"] if self.one_by_one else linear
        logits = product(_wide(x), _wide(self.weight))
        scores = _scores(logits, config)
        if self.by_token is None:
            chosen = self._best(scores)
        else:
            assert tokens is not None, "these experts are chosen by tokens"
            chosen = self.by_token[tokens]
        weights = scores.gather(1, chosen)
        if config.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=config.least_sum)
        return chosen, weights * config.scale

    def check_table(self) -> None:
        """That a table of tokens names experts that there are."""
        table, count = self.by_token, self.config.num_experts
        if table is not None and table.numel() and not 0 <= table.min() <= table.max() < count:
            raise ShapeMismatch(
                f"a table of experts by token holds {int(table.min())} to {int(table.max())}; the "
                f"model has {count} experts. Config and weights do not belong together."
            )

    def _best(self, scores: torch.Tensor) -> torch.Tensor:
        config = self.config
        choosing = scores if self.correction is None else scores + self.correction
        if config.num_groups > 1:
            choosing = _best_groups(choosing.detach(), config)
        return choosing.topk(config.top_k, dim=-1).indices


def _scores(logits: torch.Tensor, config: MoeConfig) -> torch.Tensor:
    if config.scoring == "sigmoid":
        return logits.sigmoid()
    if config.scoring == "sqrtsoftplus":
        return softplus(logits).sqrt()
    return logits.softmax(dim=-1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _best_groups(scores: torch.Tensor, config: MoeConfig) -> torch.Tensor:
    """Scores [T, experts] with all but the best groups ruled out; a group's score is that of its
    two best experts."""
    groups = scores.view(len(scores), config.num_groups, -1)
    best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(config.top_groups, dim=-1).indices, True)
    return groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)


class Experts(nn.Module):
    """The experts' matrices, and the rows of a batch through those that were chosen."""

    def __init__(self, config: MoeConfig, hidden: int, limit: Limit | None = None):
        super().__init__()
        self.limit = limit
        self.gate_up = Stack(config.num_experts, hidden, 2 * config.width)
        self.down = Stack(config.num_experts, config.width, hidden)

    @property
    def first(self) -> Stack:
        """The matrices that rows meet first."""
        return self.gate_up

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What lies between the two products."""
        gate, up = x.chunk(2, dim=-1)
        return gated(gate, up, self.limit)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], chosen and weights [T, k] -> the weighted sum [T, hidden]."""
        if x.shape[0] == 0:
            return x
        top_k = chosen.shape[1]
        experts, order = chosen.flatten().sort(stable=True)
        sorted_rows = x[order // top_k]
        counts = torch.bincount(experts).tolist()
        first, second = self.first.product(), self.down.product()
        parts, start = [], 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            inner = self.inner(first(sorted_rows[start : start + count], expert))
            parts.append(second(inner, expert))
            start += count
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        said = torch.cat(parts)[places].view(*chosen.shape, -1)
        return (said * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


class Mixture(nn.Module):
    """What all mixtures of experts are, whatever an expert is."""


class MoE(Mixture):
    """Routed experts, and shared ones that every row passes through."""

    def __init__(
        self,
        config: MoeConfig,
        hidden: int,
        limit: Limit | None = None,
        shared_limit: Limit | None = None,
        *,
        vocab: int = 0,  # where a table says which experts a token has
    ):
        super().__init__()
        self.router = Router(config, hidden, vocab=vocab)
        self.experts = Experts(config, hidden, limit)
        width = config.shared_width
        self.shared = MLP(hidden, width, limit=shared_limit) if width else None
        self.shared_gate = Linear(hidden, 1) if config.shared_gate else None

    def forward(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        result: Any = self.experts(x, *self.router(x, tokens))
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = self.shared_gate(x).sigmoid() * shared
            result = result + shared
        assert isinstance(result, torch.Tensor)
        return result
