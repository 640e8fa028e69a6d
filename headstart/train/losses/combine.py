"""One number from the losses of all depths, with the stored gradients behind it.

Normalisation is the caller's: `normaliser` is what the sum over rows is divided by, the same on
every rank and for every micro-batch of a step, so that each row weighs the same wherever it is.

`rows` says, for each entry of a depth's losses, which row t of the sequence its chain starts from;
-1 marks an entry that does not count (a chain that would start before its document).

K depths (from 1), R entries of a depth, T rows of the sequence, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.errors import ConfigError
from headstart.train.losses.rows import RowLosses


def step_weights(beta: float, num_depths: int) -> tuple[float, ...]:
    """beta^(k-1) over their sum, for k = 1..K (FastMTP)."""
    if not beta > 0 or num_depths < 1:
        raise ConfigError(
            f"beta is {beta} and K is {num_depths}; give a beta above 0 and at least one depth"
        )
    powers = [beta**k for k in range(num_depths)]
    return tuple(power / sum(powers) for power in powers)


def weighted_loss(
    depths: Sequence[Tensor],
    losses: Sequence[RowLosses],
    rows: Sequence[Tensor],
    weights: Sequence[float],
    normaliser: Tensor | float,
) -> Tensor:
    """Sum over depths of weight * sum of the counted rows' losses / normaliser; a scalar.

    depths: the K states [R, D] that the losses were computed from, with their graph.
    """
    scales = [
        (starts >= 0).to(part.loss) * weight / normaliser
        for part, starts, weight in zip(losses, rows, weights, strict=True)
    ]
    total = torch.stack(
        [(part.loss * scale).sum() for part, scale in zip(losses, scales, strict=True)]
    ).sum()
    return attach(total, depths, [part.gradient for part in losses], scales)


def end_to_end_loss(
    depths: Sequence[Tensor],
    losses: Sequence[RowLosses],
    rows: Sequence[Tensor],
    num_rows: int,
    normaliser: Tensor | float,
) -> Tensor:
    """End-to-end TV (arXiv 2606.12370): sum of 1 - (1/K) sum_j prod_{i<=j} overlap_i over the rows
    of which every depth has an entry, / normaliser; a scalar. One minus the expected share of
    drafts that rejection sampling accepts. The losses are those of kind `e2e-tv`.
    """
    overlaps = torch.stack(
        [_spread(part.overlap, starts, num_rows) for part, starts in zip(losses, rows, strict=True)]
    )
    counted = complete_rows(rows, num_rows).to(overlaps) / normaliser
    total = ((1 - overlaps.cumprod(0).mean(0)) * counted).sum()
    chain = end_to_end_weights(overlaps) * counted
    scales = [
        torch.where(starts >= 0, weight[starts.clamp_min(0)], 0.0)
        for weight, starts in zip(chain, rows, strict=True)
    ]
    return attach(total, depths, [part.gradient for part in losses], scales)


def complete_rows(rows: Sequence[Tensor], num_rows: int) -> Tensor:
    """Rows t of which every depth has an entry, bool [T]: what `end_to_end_loss` counts."""
    present = [_spread(torch.ones_like(starts), starts, num_rows) for starts in rows]
    return torch.stack(present).all(0)


def end_to_end_weights(overlaps: Tensor) -> Tensor:
    """w_m = (1/K) sum_{j>=m} prod_{i<=j, i!=m} overlap_i for each depth m, [K, T] of [K, T].

    The derivative of the end-to-end loss by TV_m, without dividing by an overlap that may be 0:
    what comes before m times the chains that go on behind it.
    """
    num_depths = len(overlaps)
    before = torch.ones_like(overlaps)
    before[1:] = overlaps[:-1].cumprod(0)
    behind = torch.ones_like(overlaps)
    for m in range(num_depths - 2, -1, -1):
        behind[m] += overlaps[m + 1] * behind[m + 1]
    return before * behind / num_depths


def attach(
    loss: Tensor, depths: Sequence[Tensor], gradients: Sequence[Tensor], scales: Sequence[Tensor]
) -> Tensor:
    """`loss`, whose backward sends scale[r] * gradient[r] into each depth's states [R, D].

    A tensor given at several depths, or used elsewhere as well, receives the sum.
    """
    result: Tensor = _Stored.apply(loss, len(depths), *depths, *gradients, *scales)
    return result


def _spread(values: Tensor, starts: Tensor, num_rows: int) -> Tensor:
    """Values [R] at their rows of a zero [T]; a spare last place takes what does not count."""
    room = values.new_zeros(num_rows + 1)
    return room.scatter_(0, torch.where(starts >= 0, starts, num_rows), values)[:num_rows]


class _Stored(torch.autograd.Function):
    """Passes a value on; its gradients were formed when it was."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, num_depths: int, *tensors: Tensor) -> Tensor:
        ctx.num_depths = num_depths
        ctx.save_for_backward(*tensors[num_depths:])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        num = ctx.num_depths
        gradients, scales = ctx.saved_tensors[:num], ctx.saved_tensors[num:]
        received = [
            gradient * (scale * outer[0]).to(gradient.dtype).unsqueeze(-1)
            for gradient, scale in zip(gradients, scales, strict=True)
        ]
        return None, None, *received, *[None] * (2 * num)
