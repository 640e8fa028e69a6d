"""Experts: rows through the matrices that they chose, each matrix read once.

A choice is a pair of a row and an expert. Of the pairs with one expert the first one's programs
do the work for all, up to a tile of them at a time; the programs of the others end at once. So a
launch has the same size whatever was chosen, and nothing waits for a sort: the first product finds
the rows of its expert by itself, and leaves a list for the second. From some number of rows on
sorting pays: then a program gets a tile of pairs that were sorted by expert.

The shared experts are those from number E on: parts of one wide MLP, as wide as an expert each.
The output of a pair's expert is left as a term of its own, already weighted: the terms are added up
in the order of a row's choices, so a result does not depend on timing.

M rows, C choices of a row, E routed experts, H model width, W width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.gates import gated
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.sorting import MOST, empty_lists, sort_pairs, tile_for

# Tiles of 128 pairs read weights and rows half as often as tiles of 64: on an H200 a layer is 1.3
# times as fast at 4000 rows (`benchmarks/gpu_moe.py --tiles`).
_WIDE_TILE = 128
_WIDE_BYTES = 147456  # of shared memory, that a program with such a tile takes
_SCANNED = 64
MAX_SCANNED_ROWS = _SCANNED
_FEW_PAIRS = 16  # of a tile
PROGRAMS = 264  # two for each multiprocessor of an H200


@dataclass(frozen=True)
class ExpertWeights:
    """gate_up [E, 2 W, H] and down [E, H, W]; the shared ones [2 V, H] and [H, V], or None."""

    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None

    @property
    def count(self) -> int:
        return self.gate_up.shape[0]

    @property
    def expert_bytes(self) -> int:
        return self.gate_up[0].nbytes + self.down[0].nbytes

    @property
    def width(self) -> int:
        return self.down.shape[2]

    @property
    def shared_width(self) -> int:
        return 0 if self.shared_down is None else self.shared_down.shape[1]

    @property
    def num_shared(self) -> int:
        """Experts that the shared MLP counts as; the last one may be narrower."""
        return -(-self.shared_width // self.width)


def expert_terms(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertWeights,
    shapes: tuple[Shape, Shape] | None = None, limit: float = 0,
) -> Tensor:  # fmt: skip
    """x [M, H], chosen and weights [M, C] -> terms [C, M, H], whose sum over C is the result.

    A row that chose -1 has terms of zero. Terms are fp32 for few rows, of x's type for many.
    shapes: cuts of the two products; limit: of inner products, 0 for none.
    """
    rows, choices = chosen.shape
    hidden, width = x.shape[1], experts.width
    assert x.is_contiguous() and chosen.is_contiguous() and weights.is_contiguous()
    assert experts.gate_up.is_contiguous() and experts.down.is_contiguous()
    count = experts.gate_up.shape[0]
    pairs = rows * choices
    inner = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    is_sorted = rows > MAX_SCANNED_ROWS
    if is_sorted:
        lists = sort_pairs(chosen, count + experts.num_shared, most=most_pairs(x.dtype, x.device))
        first, second = shapes or _cuts_many(lists.tile)
        terms = torch.zeros(choices, rows, hidden, dtype=x.dtype, device=x.device)
    else:
        lists = empty_lists(chosen, _SCANNED, tile_for(pairs, count + experts.num_shared))
        first, second = shapes or (_cut(width, pairs), _cut(hidden, pairs))
        if shapes is None and lists.tile > _FEW_PAIRS:
            first, second = _cuts_many(lists.tile)
        terms = torch.empty(choices, rows, hidden, dtype=torch.float32, device=x.device)
    listed = (lists.experts, lists.starts, lists.order)
    sizes = (rows, hidden, width, experts.shared_width, count)
    _gate_up[(triton.cdiv(width, first.outputs), lists.count)](
        x, experts.gate_up, experts.shared_gate_up, *listed, inner, *sizes, CHOICES=choices,
        IS_SORTED=is_sorted, BLOCK_R=16 if rows <= 16 else _SCANNED, MOST=_SCANNED,
        BLOCK_C=triton.next_power_of_2(choices), BLOCK_M=lists.tile, BLOCK_N=first.outputs,
        BLOCK_K=first.inputs, IS_EVEN=hidden % first.inputs == 0, LIMIT=limit,
        num_warps=first.warps, num_stages=first.stages,
    )  # fmt: skip
    is_even = experts.shared_width % width == 0 and width % second.inputs == 0
    _down[(triton.cdiv(hidden, second.outputs), lists.count)](
        inner, experts.down, experts.shared_down, *listed, weights, terms, *sizes,
        CHOICES=choices, BLOCK_M=lists.tile, BLOCK_N=second.outputs, BLOCK_K=second.inputs,
        IS_EVEN=is_even, num_warps=second.warps, num_stages=second.stages,
    )  # fmt: skip
    return terms


def _cut(outputs: int, pairs: int) -> Shape:
    """As wide as leaves enough programs; `benchmarks/gpu_moe.py --cuts` measures others."""
    wide = next((n for n in (64, 32) if pairs * (outputs // n) >= PROGRAMS), 16)
    return Shape(outputs=wide, inputs=128, warps=4, stages=3 if wide == 64 else 4)


def most_pairs(dtype: torch.dtype, device: torch.device) -> int:
    """Of a tile of many rows: sums of more products of fp32 would not fit into registers."""
    if triton.knobs.runtime.interpret:
        return _WIDE_TILE
    return _WIDE_TILE if dtype.itemsize == 2 and has_room(device) else MOST


@cache
def has_room(device: torch.device) -> bool:
    """Whether a GPU has the shared memory for wide tiles: those for graphics have less."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= _WIDE_BYTES


def _cuts_many(tile: int) -> tuple[Shape, Shape]:
    """Of both products. Wide tiles read as much of rows as of the matrices, of which gate and up
    have two."""
    if tile == _WIDE_TILE:
        first, second = (Shape(outputs=n, inputs=64, warps=8, stages=3) for n in (128, 256))
        return first, second
    usual = Shape(outputs=64, inputs=128 if tile <= 32 else 64, warps=4, stages=3)
    return usual, usual


@jit
def scan(chosen, pair, rows, CHOICES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """The expert of `pair`, the pairs [BLOCK_R] of the rows that chose it, too, or -1, how many.

    0 of them where an earlier row has the same expert: its programs do the work.
    """
    expert = tl.load(chosen + pair)
    row = tl.arange(0, BLOCK_R)
    choice = tl.arange(0, BLOCK_C)
    is_choice = (row[:, None] < rows) & (choice[None, :] < CHOICES)
    ids = tl.load(chosen + row[:, None] * CHOICES + choice[None, :], is_choice, -1)
    # A row chooses an expert once.
    pairs = row[:, None] * CHOICES + choice[None, :]
    own = tl.max(tl.where((ids == expert) & is_choice, pairs, -1), 1)
    first = tl.min(tl.where(own >= 0, own, rows * CHOICES), 0)
    count = tl.where((first == pair) & (expert >= 0), tl.sum((own >= 0).to(tl.int32), 0), 0)
    return expert, own, count


@jit
def _ranked(own, start, BLOCK_M: tl.constexpr):
    """Of the pairs that are not -1 those of rank start, start + 1 and so on: [BLOCK_M]."""
    line = start + tl.arange(0, BLOCK_M)
    rank = tl.cumsum((own >= 0).to(tl.int32), 0) - 1
    is_line = (rank[:, None] == line[None, :]) & (own[:, None] >= 0)
    return tl.sum(tl.where(is_line, own[:, None], 0), 0)


@jit(do_not_specialize=["rows"])
def _gate_up(x, weight, shared, experts, starts, order, inner, rows, hidden, width, shared_width,
             num_experts, CHOICES: tl.constexpr, IS_SORTED: tl.constexpr, BLOCK_R: tl.constexpr,
             MOST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr,
             LIMIT: tl.constexpr = 0):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    line = tl.arange(0, BLOCK_M)
    if IS_SORTED:
        expert = tl.load(experts + tile)
        start = tl.load(starts + 2 * tile)
        count = tl.load(starts + 2 * tile + 1)
        if count > 0:
            pairs = tl.load(order + start + line, line < count, 0)
            _gate_up_tile(x, weight, shared, inner, pairs, line < count, columns, expert, hidden,
                          width, shared_width, num_experts, CHOICES, BLOCK_M, BLOCK_N, BLOCK_K,
                          IS_EVEN, LIMIT)  # fmt: skip
    else:
        expert, own, count = scan(experts, tile, rows, CHOICES, BLOCK_R, BLOCK_C)
        is_first = tl.program_id(0) == 0
        if is_first:
            tl.store(starts + 2 * tile, tile * MOST)
            tl.store(starts + 2 * tile + 1, count)
        for start in range(0, count, BLOCK_M):
            pairs = _ranked(own, start, BLOCK_M)
            if is_first:
                tl.store(order + tile * MOST + start + line, pairs, start + line < count)
            _gate_up_tile(x, weight, shared, inner, pairs, start + line < count, columns, expert,
                          hidden, width, shared_width, num_experts, CHOICES, BLOCK_M, BLOCK_N,
                          BLOCK_K, IS_EVEN, LIMIT)  # fmt: skip


@jit
def _gate_up_tile(x, weight, shared, inner, pairs, is_pair, columns, expert, hidden, width,
                  shared_width, num_experts, CHOICES: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr,
                  LIMIT: tl.constexpr):  # fmt: skip
    base = weight + expert.to(tl.int64) * 2 * width * hidden
    to_up = width
    outputs = width
    if shared is not None:
        part = (expert - num_experts) * width  # columns of the shared MLP before this one's
        if part >= 0:
            base = shared + part.to(tl.int64) * hidden
            to_up = shared_width
            outputs = tl.minimum(width, shared_width - part)
    row = pairs // CHOICES
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for first in range(0, hidden, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        w_mask = columns[:, None] < outputs
        x_mask = is_pair[None, :]
        if not IS_EVEN:
            w_mask = w_mask & (at[None, :] < hidden)
            x_mask = x_mask & (at[:, None] < hidden)
        where = columns[:, None] * hidden + at[None, :]
        g = tl.load(base + where, w_mask, 0.0)
        u = tl.load(base + to_up.to(tl.int64) * hidden + where, w_mask, 0.0)
        v = tl.load(x + row[None, :] * hidden + at[:, None], x_mask, 0.0)
        gate = tl.dot(g, v, gate, input_precision="ieee")
        up = tl.dot(u, v, up, input_precision="ieee")
    value = gated(gate, up, LIMIT)
    where = pairs[None, :] * width + columns[:, None]
    mask = is_pair[None, :] & (columns[:, None] < width)
    tl.store(inner + where, value.to(inner.dtype.element_ty), mask)


@jit(do_not_specialize=["rows"])
def _down(inner, weight, shared, experts, starts, order, weights, terms, rows, hidden, width,
          shared_width, num_experts, CHOICES: tl.constexpr, BLOCK_M: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    line = tl.arange(0, BLOCK_M)
    expert = tl.load(experts + tile)
    begin = tl.load(starts + 2 * tile)
    count = tl.load(starts + 2 * tile + 1)
    if expert < 0:  # a row of no request, whose pairs are not sorted
        where = (tile % CHOICES * rows + tile // CHOICES) * hidden + columns
        zero = tl.zeros((BLOCK_N,), dtype=terms.dtype.element_ty)
        tl.store(terms + where, zero, columns < hidden)
    for start in range(0, count, BLOCK_M):
        is_pair = start + line < count
        pairs = tl.load(order + begin + start + line, is_pair, 0)
        _down_tile(inner, weight, shared, weights, terms, pairs, is_pair, columns, expert, rows,
                   hidden, width, shared_width, num_experts, CHOICES, BLOCK_M, BLOCK_N, BLOCK_K,
                   IS_EVEN)  # fmt: skip


@jit
def _down_tile(inner, weight, shared, weights, terms, pairs, is_pair, columns, expert, rows, hidden,
               width, shared_width, num_experts, CHOICES: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    base = weight + expert.to(tl.int64) * width * hidden
    stride = width
    inputs = width
    if shared is not None:
        part = (expert - num_experts) * width
        if part >= 0:
            base = shared + part
            stride = shared_width
            inputs = tl.minimum(width, shared_width - part)
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    is_output = columns[:, None] < hidden
    for first in range(0, width, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        w_mask = is_output
        v_mask = is_pair[None, :]
        if not IS_EVEN:
            w_mask = w_mask & (at[None, :] < inputs)
            v_mask = v_mask & (at[:, None] < inputs)
        w = tl.load(base + columns[:, None] * stride + at[None, :], w_mask, 0.0)
        v = tl.load(inner + pairs[None, :] * width + at[:, None], v_mask, 0.0)
        sums = tl.dot(w, v, sums, input_precision="ieee")
    share = tl.load(weights + pairs, is_pair, 0.0)
    value = sums * share[None, :]
    # Terms lie by choice, then by row.
    place = (pairs % CHOICES * rows + pairs // CHOICES).to(tl.int64) * hidden
    mask = is_pair[None, :] & is_output
    tl.store(terms + place[None, :] + columns[:, None], value.to(terms.dtype.element_ty), mask)
