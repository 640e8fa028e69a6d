"""Which experts a row goes to, and with what weight: one program per row.

The experts that every row passes through count as experts after the routed ones: with them each
row has a fixed number of choices, and the products need not tell the two apart.

M rows, E routed experts, C choices of a row (those of the router, then the shared ones), S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

_LEAST = tl.constexpr(-(2**63))


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router chooses; `num_shared` experts follow its own."""

    num_experts: int
    top_k: int
    is_sigmoid: bool  # else softmax
    num_groups: int
    top_groups: int
    renormalise: bool
    least_sum: float
    scale: float
    num_shared: int

    @property
    def num_choices(self) -> int:
        return self.top_k + self.num_shared


def choose_experts(
    partial: Tensor, routing: Routing, correction: Tensor | None = None,
    slots: Tensor | None = None, gate: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """partial [S, M, E] sums up to the router's logits -> experts [M, C] int32, weights [M, C].

    correction [E] is added to the scores that choose, not to those that weigh. A row whose slot
    [M] is below 0 goes nowhere: its experts are -1. gate: rows x [M, K] and a weight [1, K] whose
    sigmoid weighs the shared experts.
    """
    splits, rows, experts = partial.shape
    assert experts == routing.num_experts and partial.is_contiguous()
    chosen = torch.empty(rows, routing.num_choices, dtype=torch.int32, device=partial.device)
    weights = torch.empty(rows, routing.num_choices, dtype=torch.float32, device=partial.device)
    x, gate_weight = gate if gate is not None else (None, None)
    each = experts // routing.num_groups
    _choose_experts[(rows,)](
        partial, correction, slots, x, gate_weight, chosen, weights, rows,
        x.shape[1] if x is not None else 0, routing.least_sum, routing.scale,
        SPLITS=splits, GROUPS=routing.num_groups, EACH=each, TOP_GROUPS=routing.top_groups,
        TOP_K=routing.top_k, SHARED=routing.num_shared, IS_SIGMOID=routing.is_sigmoid,
        RENORMALISE=routing.renormalise, BLOCK_G=triton.next_power_of_2(routing.num_groups),
        BLOCK_E=triton.next_power_of_2(each), BLOCK_C=triton.next_power_of_2(routing.num_choices),
        BLOCK_K=512, num_warps=1 if experts <= 512 else 4,
    )  # fmt: skip
    return chosen, weights


@jit
def _ordered(value, index):
    """An int64 that is larger for a larger fp32 value, and for a lower index of equal ones."""
    bits = value.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@jit
def _value_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _best_groups(keys, GROUPS: tl.constexpr, EACH: tl.constexpr, TOP_GROUPS: tl.constexpr,
                 BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """The same keys with those of all but the best groups at the bottom."""
    table = tl.reshape(keys, (BLOCK_G, BLOCK_E))
    first = tl.max(table, 1)
    score = _value_of(first)
    if EACH > 1:  # a group's score is that of its two best experts
        score += _value_of(tl.max(tl.where(table == first[:, None], _LEAST, table), 1))
    group = tl.arange(0, BLOCK_G)
    order = tl.where(group < GROUPS, _ordered(score, group), _LEAST)
    is_kept = group < 0
    for _ in range(TOP_GROUPS):
        is_best = order == tl.max(order, 0)
        is_kept = is_kept | is_best
        order = tl.where(is_best, _LEAST, order)
    return tl.reshape(tl.where(is_kept[:, None], table, _LEAST), (BLOCK_G * BLOCK_E,))


@jit(do_not_specialize=["rows"])
def _choose_experts(partial, correction, slots, x, gate, chosen, weights, rows, inputs, least_sum,
                    scale, SPLITS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr,
                    TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
                    IS_SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK_G: tl.constexpr,
                    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
                    BLOCK_K: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK_G * BLOCK_E)  # each group begins at a power of two
    expert = lane // BLOCK_E * EACH + lane % BLOCK_E
    is_expert = (lane // BLOCK_E < GROUPS) & (lane % BLOCK_E < EACH)
    logits = tl.zeros((BLOCK_G * BLOCK_E,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        where = (split * rows + row) * (GROUPS * EACH) + expert
        logits += tl.load(partial + where, is_expert, 0.0).to(tl.float32)
    if IS_SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        logits = tl.where(is_expert, logits, float("-inf"))
        top = tl.max(logits, 0)
        scores = tl.exp(logits - top)
        total = tl.sum(scores, 0)
        scores = scores / total
    choosing = scores
    if correction is not None:
        choosing = scores + tl.load(correction + expert, is_expert, 0.0).to(tl.float32)
    keys = tl.where(is_expert, _ordered(choosing, expert), _LEAST)
    if GROUPS > 1:
        keys = _best_groups(keys, GROUPS, EACH, TOP_GROUPS, BLOCK_G, BLOCK_E)

    choice = tl.arange(0, BLOCK_C)
    found = choice + (GROUPS * EACH - TOP_K)  # right for the shared ones
    for number in range(TOP_K):
        best = tl.max(keys, 0)
        index = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        found = tl.where(choice == number, index, found)
        keys = tl.where(keys == best, _LEAST, keys)
    # Their scores once more: that is less work than finding them among all.
    weight = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        where = (split * rows + row) * (GROUPS * EACH) + found
        weight += tl.load(partial + where, choice < TOP_K, 0.0).to(tl.float32)
    if IS_SIGMOID:
        weight = tl.sigmoid(weight)
    else:
        weight = tl.exp(weight - top) / total
    weight = tl.where(choice < TOP_K, weight, 0.0)
    if RENORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, 0), least_sum)
    weight = weight * scale
    if SHARED > 0:
        share = 1.0
        if gate is not None:
            products = tl.zeros((BLOCK_K,), dtype=tl.float32)
            for start in range(0, inputs, BLOCK_K):
                inner = start + tl.arange(0, BLOCK_K)
                own = tl.load(x + row * inputs + inner, inner < inputs, 0.0).to(tl.float32)
                products += own * tl.load(gate + inner, inner < inputs, 0.0).to(tl.float32)
            share = tl.sigmoid(tl.sum(products, 0))
        weight = tl.where(choice >= TOP_K, share, weight)
    if slots is not None:
        is_placed = tl.load(slots + row) >= 0
        found = tl.where(is_placed, found, -1)
    where = row * (TOP_K + SHARED) + choice
    tl.store(chosen + where, found, choice < TOP_K + SHARED)
    tl.store(weights + where, weight, choice < TOP_K + SHARED)
