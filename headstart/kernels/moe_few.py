"""Experts of few rows, by other ways than `moe.py`: nobody waits with idle memory.

With a row or two both products are so short that what lies between them shows: the second one is
launched after the last program of the first, looks for its rows, and only then asks for weights.
The ways, to be measured beside each other (`benchmarks/gpu_moe.py --ways`):

- apart: the two launches of `moe.py`, the second after the first.
- ahead: programs of the first product ask for the weights that the second will read, so that it
  finds them in the L2 cache.
- early: the second is launched while the first runs (a programmatic dependent launch); its programs
  look for their rows, ask for their weights, and wait for the first.
- one: a single launch. Programs of the second product come behind those of the first, ask for
  their weights, and wait until the rows of their expert are there.
- vector: `moe_vector.py` for as few rows as it is made for, early for more.

All but the last compute what `moe.py` does, in the same order: only when weights are asked for
differs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.kernels import moe
from headstart.kernels.linear import Shape
from headstart.kernels.moe import (
    PROGRAMS,
    ExpertWeights,
    _down_tile,
    _gate_up_tile,
    _ranked,
    _scan,
    expert_terms,
)
from headstart.kernels.moe_vector import CUTS, MOST_ROWS, vector_terms
from headstart.kernels.routing import chained

WAYS = ("apart", "ahead", "early", "one", "vector")
_TILE = 16  # rows of an expert at a time
_LINE_BYTES = 128
_MOST_PAIRS = 1 << 13  # that have a counter
_LEFT = tl.constexpr(1 << 16)  # what a program of the second product adds when it is done


def few_terms(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertWeights, way: str = "apart",
    shapes: tuple[Shape, Shape] | None = None, *, is_chained: bool = False,
) -> Tensor:  # fmt: skip
    """As `expert_terms`, by one of WAYS; more rows than are scanned go apart.

    A single launch has the warps and stages of the first of `shapes`. is_chained: the first launch
    may begin while the choice runs, where the way has such launches (early, vector).
    """
    rows, choices = chosen.shape
    pairs = rows * choices
    if way == "apart" or rows > moe.MAX_SCANNED_ROWS or pairs > _MOST_PAIRS:
        return expert_terms(x, chosen, weights, experts, shapes)
    if way == "vector" and rows <= MOST_ROWS:
        return vector_terms(x, chosen, weights, experts, shapes or CUTS, is_chained=is_chained)
    assert way in WAYS and x.is_contiguous() and chosen.is_contiguous() and weights.is_contiguous()
    assert experts.gate_up.is_contiguous() and experts.down.is_contiguous()
    hidden, width = x.shape[1], experts.width
    inner = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    terms = torch.empty(choices, rows, hidden, dtype=torch.float32, device=x.device)
    first, second = shapes or few_cuts(width, hidden, pairs)
    parts = triton.cdiv(width, first.outputs), triton.cdiv(hidden, second.outputs)
    sizes = (rows, hidden, width, experts.shared_width, experts.gate_up.shape[0])
    gates, downs = (experts.gate_up, experts.shared_gate_up), (experts.down, experts.shared_down)
    scan = {"CHOICES": choices, "BLOCK_R": 16 if rows <= 16 else 64,
            "BLOCK_C": triton.next_power_of_2(choices), "BLOCK_M": _TILE}  # fmt: skip
    one = {"FIRST_N": first.outputs, "FIRST_K": first.inputs,
           "FIRST_EVEN": hidden % first.inputs == 0}  # fmt: skip
    is_even = experts.shared_width % width == 0 and width % second.inputs == 0
    two = {"SECOND_N": second.outputs, "SECOND_K": second.inputs, "SECOND_EVEN": is_even}
    # Nothing is asked for in the interpreter, which has no caches.
    lines = triton.next_power_of_2(triton.cdiv(width * x.element_size(), _LINE_BYTES))
    lines = lines if x.is_cuda else 0
    is_early = way in ("early", "vector") and x.is_cuda
    is_chained = is_chained and is_early
    if way == "one":
        _both[((parts[0] + parts[1]) * pairs,)](
            x, *gates, *downs, chosen, inner, weights, terms, _counters(x.device), *sizes, **scan,
            **one, **two, LINES=lines, FIRST_PARTS=parts[0], SECOND_PARTS=parts[1],
            **_launched(first),
        )  # fmt: skip
        return terms
    share = triton.next_power_of_2(triton.cdiv(hidden, parts[0])) if way == "ahead" else 0
    _first[(parts[0], pairs)](
        x, *gates, *downs, chosen, inner, *sizes, **scan, **one, LINES=lines if share else 0,
        SHARE=share, IS_EARLY=is_early, IS_CHAINED=is_chained, **_launched(first),
        **chained(is_chained),
    )  # fmt: skip
    _second[(parts[1], pairs)](
        inner, *downs, chosen, weights, terms, *sizes, **scan, **two,
        LINES=lines if is_early else 0, IS_EARLY=is_early, **_launched(second),
        **chained(is_early),
    )  # fmt: skip
    return terms


def few_cuts(width: int, hidden: int, pairs: int) -> tuple[Shape, Shape]:
    """Both products in tiles so small that four programs fit on a multiprocessor."""
    outputs = 32 if pairs * (width // 32) >= PROGRAMS else 16
    cut = Shape(outputs=outputs, inputs=128, warps=4, stages=4 if outputs == 16 else 3)
    return cut, Shape(outputs=32, inputs=128, warps=4, stages=4)


def _launched(shape: Shape) -> dict[str, Any]:
    return {"num_warps": shape.warps, "num_stages": shape.stages}


@cache
def _counters(device: torch.device) -> Tensor:
    """One for each pair, zero between launches; launches on one device follow each other."""
    return torch.zeros(_MOST_PAIRS, dtype=torch.int32, device=device)


@triton.jit
def _ask(weight, shared, expert, count, columns, hidden, width, shared_width, num_experts,
         LINES: tl.constexpr):  # fmt: skip
    """Weights of an expert's second product, for these columns, begin to move into the L2 cache."""
    if count > 0:  # else others ask for them
        base = weight + expert.to(tl.int64) * width * hidden
        stride = width
        inputs = width
        if shared is not None:
            part = (expert - num_experts) * width
            if part >= 0:
                base = shared + part
                stride = shared_width
                inputs = tl.minimum(width, shared_width - part)
        step: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # in 128 bytes
        at = tl.minimum(tl.arange(0, LINES) * step, inputs - 1)
        row = tl.minimum(columns, hidden - 1)
        where = (base + row[:, None] * stride + at[None, :]).to(tl.int64)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [where],
                                  dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def _await(ready, pair, count, FIRST_PARTS: tl.constexpr):
    """Until all programs of the first product have counted up for a pair that has rows."""
    if count > 0:
        done = tl.atomic_add(ready + pair, 0, sem="acquire")
        while done % _LEFT < FIRST_PARTS:
            done = tl.atomic_add(ready + pair, 0, sem="acquire")


@triton.jit
def _leave(ready, pair, count, FIRST_PARTS: tl.constexpr, SECOND_PARTS: tl.constexpr):
    """The last program of a pair clears up for the next launch."""
    if count > 0:
        before = tl.atomic_add(ready + pair, _LEFT)
        if before == FIRST_PARTS + (SECOND_PARTS - 1) * _LEFT:
            tl.atomic_xchg(ready + pair, 0)


@triton.jit
def _gate_up_of(x, weight, shared, down, shared_down, chosen, inner, rows, hidden, width,
                shared_width, num_experts, part, pair, CHOICES: tl.constexpr,
                BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
                FIRST_N: tl.constexpr, FIRST_K: tl.constexpr, FIRST_EVEN: tl.constexpr,
                LINES: tl.constexpr, SHARE: tl.constexpr):  # fmt: skip
    """One part of the first product for a pair's expert; how many pairs had it, 0 for none."""
    columns = part * FIRST_N + tl.arange(0, FIRST_N)
    line = tl.arange(0, BLOCK_M)
    expert, own, count = _scan(chosen, pair, rows, CHOICES, BLOCK_R, BLOCK_C)
    if LINES > 0:
        _ask(down, shared_down, expert, count, part * SHARE + tl.arange(0, SHARE), hidden, width,
             shared_width, num_experts, LINES)  # fmt: skip
    for start in range(0, count, BLOCK_M):
        pairs = _ranked(own, start, BLOCK_M)
        _gate_up_tile(x, weight, shared, inner, pairs, start + line < count, columns, expert,
                      hidden, width, shared_width, num_experts, CHOICES, BLOCK_M, FIRST_N,
                      FIRST_K, FIRST_EVEN)  # fmt: skip
    return count


@triton.jit
def _down_of(inner, weight, shared, chosen, weights, terms, ready, rows, hidden, width,
             shared_width, num_experts, part, pair, CHOICES: tl.constexpr, BLOCK_R: tl.constexpr,
             BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, SECOND_N: tl.constexpr,
             SECOND_K: tl.constexpr, SECOND_EVEN: tl.constexpr, LINES: tl.constexpr,
             IS_EARLY: tl.constexpr, FIRST_PARTS: tl.constexpr,
             SECOND_PARTS: tl.constexpr):  # fmt: skip
    """One part of the second product for a pair's expert, once the first is there."""
    columns = part * SECOND_N + tl.arange(0, SECOND_N)
    line = tl.arange(0, BLOCK_M)
    expert, own, count = _scan(chosen, pair, rows, CHOICES, BLOCK_R, BLOCK_C)
    if LINES > 0:
        _ask(weight, shared, expert, count, columns, hidden, width, shared_width, num_experts,
             LINES)  # fmt: skip
    if IS_EARLY:  # nothing is written before: others may still read there
        tl.extra.cuda.gdc_wait()
    if expert < 0:  # a row of nobody
        where = (pair % CHOICES * rows + pair // CHOICES) * hidden + columns
        tl.store(terms + where, tl.zeros((SECOND_N,), dtype=tl.float32), columns < hidden)
    if ready is not None:
        _await(ready, pair, count, FIRST_PARTS)
    for start in range(0, count, BLOCK_M):
        pairs = _ranked(own, start, BLOCK_M)
        _down_tile(inner, weight, shared, weights, terms, pairs, start + line < count, columns,
                   expert, rows, hidden, width, shared_width, num_experts, CHOICES, BLOCK_M,
                   SECOND_N, SECOND_K, SECOND_EVEN)  # fmt: skip
    if ready is not None:
        _leave(ready, pair, count, FIRST_PARTS, SECOND_PARTS)


@triton.jit(do_not_specialize=["rows"])
def _first(x, weight, shared, down, shared_down, chosen, inner, rows, hidden, width, shared_width,
           num_experts, CHOICES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
           BLOCK_M: tl.constexpr, FIRST_N: tl.constexpr, FIRST_K: tl.constexpr,
           FIRST_EVEN: tl.constexpr, LINES: tl.constexpr, SHARE: tl.constexpr,
           IS_EARLY: tl.constexpr, IS_CHAINED: tl.constexpr):  # fmt: skip
    if IS_CHAINED:  # the second product looks at the choice before it waits for anything
        tl.extra.cuda.gdc_wait()
    if IS_EARLY:  # the second launch may begin as soon as it finds room
        tl.extra.cuda.gdc_launch_dependents()
    _gate_up_of(x, weight, shared, down, shared_down, chosen, inner, rows, hidden, width,
                shared_width, num_experts, tl.program_id(0), tl.program_id(1), CHOICES, BLOCK_R,
                BLOCK_C, BLOCK_M, FIRST_N, FIRST_K, FIRST_EVEN, LINES, SHARE)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _second(inner, weight, shared, chosen, weights, terms, rows, hidden, width, shared_width,
            num_experts, CHOICES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
            BLOCK_M: tl.constexpr, SECOND_N: tl.constexpr, SECOND_K: tl.constexpr,
            SECOND_EVEN: tl.constexpr, LINES: tl.constexpr,
            IS_EARLY: tl.constexpr):  # fmt: skip
    _down_of(inner, weight, shared, chosen, weights, terms, None, rows, hidden, width, shared_width,
             num_experts, tl.program_id(0), tl.program_id(1), CHOICES, BLOCK_R, BLOCK_C, BLOCK_M,
             SECOND_N, SECOND_K, SECOND_EVEN, LINES, IS_EARLY, 0, 0)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _both(x, weight, shared, down, shared_down, chosen, inner, weights, terms, ready, rows, hidden,
          width, shared_width, num_experts, CHOICES: tl.constexpr, BLOCK_R: tl.constexpr,
          BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, FIRST_N: tl.constexpr,
          FIRST_K: tl.constexpr, FIRST_EVEN: tl.constexpr, SECOND_N: tl.constexpr,
          SECOND_K: tl.constexpr, SECOND_EVEN: tl.constexpr, LINES: tl.constexpr,
          FIRST_PARTS: tl.constexpr, SECOND_PARTS: tl.constexpr):  # fmt: skip
    """Programs begin in the order of their numbers, so nobody waits for one that has no room."""
    number = tl.program_id(0)
    num_first = rows * CHOICES * FIRST_PARTS
    if number < num_first:
        pair = number // FIRST_PARTS
        count = _gate_up_of(x, weight, shared, down, shared_down, chosen, inner, rows, hidden,
                            width, shared_width, num_experts, number % FIRST_PARTS, pair, CHOICES,
                            BLOCK_R, BLOCK_C, BLOCK_M, FIRST_N, FIRST_K, FIRST_EVEN, 0,
                            0)  # fmt: skip
        if count > 0:
            tl.debug_barrier()  # what all threads have written comes before the count
            tl.atomic_add(ready + pair, 1, sem="release")
    else:
        number -= num_first
        _down_of(inner, down, shared_down, chosen, weights, terms, ready, rows, hidden, width,
                 shared_width, num_experts, number % SECOND_PARTS, number // SECOND_PARTS, CHOICES,
                 BLOCK_R, BLOCK_C, BLOCK_M, SECOND_N, SECOND_K, SECOND_EVEN, LINES, False,
                 FIRST_PARTS, SECOND_PARTS)  # fmt: skip
