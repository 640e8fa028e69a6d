"""Experts of a row or a few without matrix units: every pair of a row and an expert by itself.

A product of one row needs no tiles of rows: numbers go from memory into registers and are added up
there, many loads at a time and none through shared memory. The second product is launched while the
first runs (a programmatic dependent launch): its programs load their weights, then wait for the
first. Rows that chose the same expert read it once each, so this is for few of them.

Pairs, terms and shared experts are those of `moe.py`; sums are in another order than there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.gates import gated
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.moe import ExpertWeights

FEW_ROWS = 4  # at most: on an H200 tiles of rows are as quick at 6 even for 512 small experts
CUTS = (Shape(outputs=2, inputs=1024, warps=2), Shape(outputs=8, inputs=256, warps=2))


def vector_terms(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertWeights,
    shapes: tuple[Shape, Shape] = CUTS, limit: float = 0,
) -> Tensor:  # fmt: skip
    """x [M, H], chosen and weights [M, C] -> terms [C, M, H] in fp32, as `expert_terms`."""
    rows, choices = chosen.shape
    pairs, hidden, width = rows * choices, x.shape[1], experts.width
    assert x.is_contiguous() and chosen.is_contiguous() and weights.is_contiguous()
    assert experts.gate_up.is_contiguous() and experts.down.is_contiguous()
    inner = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    terms = torch.empty(choices, rows, hidden, dtype=torch.float32, device=x.device)
    sizes = (rows, hidden, width, experts.shared_width, experts.gate_up.shape[0])
    first, second = shapes
    deep = min(second.inputs, triton.next_power_of_2(width))
    is_early = x.is_cuda
    # May be launched before its forerunner has ended.
    beside = {"launch_pdl": True} if is_early else {}
    _first[(triton.cdiv(width, first.outputs), pairs)](
        x, experts.gate_up, experts.shared_gate_up, chosen, inner, *sizes, CHOICES=choices,
        BLOCK_N=first.outputs, BLOCK_K=min(first.inputs, triton.next_power_of_2(hidden)),
        IS_EARLY=is_early, LIMIT=limit, num_warps=first.warps,
    )  # fmt: skip
    _second[(triton.cdiv(hidden, second.outputs), pairs)](
        inner, experts.down, experts.shared_down, chosen, weights, terms, *sizes, CHOICES=choices,
        BLOCK_N=second.outputs, BLOCK_K=deep, IS_EARLY=is_early, num_warps=second.warps,
        **beside,
    )  # fmt: skip
    return terms


@jit(do_not_specialize=["rows"])
def _first(x, weight, shared, chosen, inner, rows, hidden, width, shared_width, num_experts,
           CHOICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
           IS_EARLY: tl.constexpr, LIMIT: tl.constexpr = 0):  # fmt: skip
    """silu(x G^T) * (x U^T) of one pair, for BLOCK_N columns of its expert."""
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1)
    expert = tl.load(chosen + pair)
    if expert >= 0:
        base = weight + expert.to(tl.int64) * 2 * width * hidden
        to_up = width
        outputs = width
        if shared is not None:
            part = (expert - num_experts) * width  # columns of the shared MLP before this one's
            if part >= 0:
                base = shared + part.to(tl.int64) * hidden
                to_up = shared_width
                outputs = tl.minimum(width, shared_width - part)
        gate = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        for start in range(0, hidden, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            mask = (columns[:, None] < outputs) & (at[None, :] < hidden)
            where = columns[:, None] * hidden + at[None, :]
            g = tl.load(base + where, mask, 0.0)
            u = tl.load(base + to_up.to(tl.int64) * hidden + where, mask, 0.0)
            v = tl.load(x + pair // CHOICES * hidden + at, at < hidden, 0.0).to(tl.float32)
            gate += g.to(tl.float32) * v[None, :]
            up += u.to(tl.float32) * v[None, :]
        gates = tl.sum(gate, 1)
        value = gated(gates, tl.sum(up, 1), LIMIT)
        where = pair * width + columns
        tl.store(inner + where, value.to(inner.dtype.element_ty), columns < width)


@jit(do_not_specialize=["rows"])
def _second(inner, weight, shared, chosen, weights, terms, rows, hidden, width, shared_width,
            num_experts, CHOICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
            IS_EARLY: tl.constexpr):  # fmt: skip
    """What one pair's expert says, weighed, for BLOCK_N outputs; zero for a row of no request."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1)
    expert = tl.load(chosen + pair)
    is_used = (expert >= 0).to(tl.int32)
    base = weight + (expert * is_used).to(tl.int64) * width * hidden
    stride = width
    inputs = width
    if shared is not None:
        part = (expert - num_experts) * width
        if part >= 0:
            base = shared + part
            stride = shared_width
            inputs = tl.minimum(width, shared_width - part)
    inputs = inputs * is_used
    at = tl.arange(0, BLOCK_K)
    is_output = columns[:, None] < hidden
    where = columns[:, None] * stride
    # The first weights are loaded before the first product is waited for, the others after it.
    w = tl.load(base + where + at[None, :], is_output & (at[None, :] < inputs), 0.0)
    share = tl.load(weights + pair)
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    v = tl.load(inner + pair * width + at, at < inputs, 0.0)
    sums = w.to(tl.float32) * v.to(tl.float32)[None, :]
    for start in range(BLOCK_K, inputs, BLOCK_K):
        w = tl.load(base + where + start + at[None, :], is_output & (start + at[None, :] < inputs),
                    0.0)  # fmt: skip
        v = tl.load(inner + pair * width + start + at, start + at < inputs, 0.0)
        sums += w.to(tl.float32) * v.to(tl.float32)[None, :]
    value = tl.sum(sums, 1) * share
    place = (pair % CHOICES * rows + pair // CHOICES).to(tl.int64) * hidden
    tl.store(terms + place + columns, value, columns < hidden)
