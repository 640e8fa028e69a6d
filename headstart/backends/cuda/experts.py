"""A mixture of experts through the kernels: few launches for a round's rows, nothing read back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headstart.backends.cuda.kernels.group_experts import GroupExperts
from headstart.backends.cuda.kernels.linear import Shape, partial_linear
from headstart.backends.cuda.kernels.moe import (
    MAX_SCANNED_ROWS,
    PROGRAMS,
    ExpertWeights,
    expert_terms,
)
from headstart.backends.cuda.kernels.moe_fp8 import fp8_terms
from headstart.backends.cuda.kernels.moe_fp8_vector import fp8_vector_terms
from headstart.backends.cuda.kernels.moe_fp8_weights import Fp8Experts
from headstart.backends.cuda.kernels.moe_groups import group_terms
from headstart.backends.cuda.kernels.moe_vector import FEW_ROWS, vector_terms
from headstart.backends.cuda.kernels.moe_wide_groups import takes_wide_experts, wide_group_terms
from headstart.backends.cuda.kernels.routing import Routing, choose_experts
from headstart.backends.cuda.quantized_experts import HeldExperts, experts_of
from headstart.models.feed_forward import MLP, MoE

# Bytes. In seven bf16 layers on an H200 (`benchmarks/gpu_moe.py --ways`) rows that read 8 to 28 MB
# again were 2 to 7 us quicker without tiles, at 50 about as quick, and slower from 60 on.
_MOST_READ_AGAIN = 40e6
_MOST_ROWS = 4096  # at a time: every choice of a row leaves a term as wide as the model


Feed = Callable[[Tensor, MLP], Tensor]  # x [M, H] -> partial sums [S, M, H]


def moe_terms(x: Tensor, moe: MoE, slots: Tensor | None, feed: Feed | None = None) -> Tensor:
    """x [M, H] -> terms [C, M, H] whose sum is what the experts say.

    slots [M]: a row with a slot below 0 belongs to no request and asks no routed expert. `feed`:
    for the MLP of shared experts that have another form than the routed ones.
    """
    rows = x.shape[0]
    if rows <= _MOST_ROWS:
        return _terms(x, moe, slots, feed)
    each = -(-rows // -(-rows // _MOST_ROWS))  # equal parts: few rows would be computed otherwise
    parts = [slice(start, start + each) for start in range(0, rows, each)]
    sums = [_terms(x[at], moe, None if slots is None else slots[at], feed).sum(0) for at in parts]
    return torch.cat(sums).unsqueeze(0)


def _terms(x: Tensor, moe: MoE, slots: Tensor | None, feed: Feed | None) -> Tensor:
    weights = experts_of(moe)
    gate = None
    if moe.shared_gate is not None and weights.num_shared:
        gate = (x, moe.shared_gate.weight)
    chosen, shares = choose_experts(
        _logits(x, moe.router.weight), routing_of(moe, weights.num_shared), moe.router.correction,
        slots, gate,
    )  # fmt: skip
    limit = moe.experts.limit
    terms = terms_of(x, chosen, shares, weights, 0 if limit is None else limit.most)
    if moe.shared is None or weights.num_shared:
        return terms
    assert feed is not None, "shared experts of another form are fed by themselves"
    said = feed(x, moe.shared)
    if moe.shared_gate is not None:
        said = said * moe.shared_gate(x).sigmoid()
    return torch.cat([terms, said.to(terms.dtype)])


def terms_of(
    x: Tensor, chosen: Tensor, shares: Tensor, weights: HeldExperts, limit: float = 0
) -> Tensor:
    """What the chosen experts say, in the way that was fastest for so many rows.

    limit: what inner products are cut off at; 0: nothing is.
    """
    rows, choices = chosen.shape
    assert not limit or isinstance(weights, ExpertWeights), "others are dequantised"
    if isinstance(weights, GroupExperts):
        if takes_wide_experts(rows, weights, x.dtype):
            return wide_group_terms(x, chosen, shares, weights)
        return group_terms(x, chosen, shares, weights)
    is_few = is_without_tiles(rows, choices, weights)
    if isinstance(weights, Fp8Experts):
        terms = fp8_vector_terms if is_few else fp8_terms
        return terms(x, chosen, shares, weights)
    if is_few:
        return vector_terms(x, chosen, shares, weights, limit=limit)
    return expert_terms(x, chosen, shares, weights, limit=limit)


def is_without_tiles(rows: int, choices: int, weights: ExpertWeights | Fp8Experts) -> bool:
    """Whether each of few rows reads its experts by itself: quicker to begin, more to read."""
    return rows <= FEW_ROWS and bytes_read_again(rows, choices, weights) <= _MOST_READ_AGAIN


def bytes_read_again(rows: int, choices: int, weights: ExpertWeights | Fp8Experts) -> float:
    """Bytes of experts that an earlier row has read already, if rows choose evenly.

    What rows chose is known to the device only, and a captured round goes one way for all texts.
    """
    count, shared = weights.count, weights.num_shared
    missed = 1 - (choices - shared) / count  # how likely a row does without an expert
    touched = count * (1 - missed**rows) + shared
    return (rows * choices - touched) * weights.expert_bytes


def routing_of(moe: MoE, num_shared: int) -> Routing:
    config = moe.router.config
    return Routing(
        num_experts=config.num_experts,
        top_k=config.top_k,
        is_sigmoid=config.scoring == "sigmoid",
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        renormalise=config.renormalise,
        least_sum=config.least_sum,
        scale=config.scale,
        num_shared=num_shared,
    )


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """Partial sums [S, M, E] in fp32, of a weight that is fp32, too."""
    if x.shape[0] > MAX_SCANNED_ROWS:
        return torch.mm(x.float(), weight.t()).unsqueeze(0)
    experts, inputs = weight.shape
    splits = 1
    while experts // 16 * splits < PROGRAMS and inputs // (2 * splits) >= 256 and splits < 16:
        splits *= 2
    # Products of fp32 keep both sides in registers: shorter steps for more rows.
    deep = 64 if x.shape[0] <= 16 else 32
    cut = Shape(outputs=16, inputs=deep, splits=splits, warps=4, stages=4)
    return partial_linear(x, weight, cut)
