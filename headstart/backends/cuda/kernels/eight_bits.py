"""Rows in 8 bits, for products with weights of 8 or 4 bits on the matrix units.

`Fp8Rows` are e4m3 with one scale per group of inputs, or per row. `IntegerRows` are two rows of
8-bit integers for each row: the nearest ones and what these leave, 16 bits together; a product
with both, added up, keeps more of a row than bf16 holds of its largest numbers.

M rows, K inputs, G inputs of a group. A scale is the group's largest number over the format's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

GROUP = 128
LARGEST = tl.constexpr(448.0)  # of e4m3
FINE = tl.constexpr(256.0)  # steps of the second integer per step of the first
_LEAST = tl.constexpr(1e-12)  # a group of zeros has no scale of its own
_WIDTH = 1024  # inputs of a program


@dataclass(frozen=True)
class Fp8Rows:
    """values [M, K] e4m3; scales [ceil(K / G), M] fp32, or [1, M] where a group is a row."""

    values: Tensor
    scales: Tensor
    group: int  # 0: a whole row

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


@dataclass(frozen=True)
class IntegerRows:
    """values [2 M, K] int8; scales and sums of the integers of a group [ceil(K / G), 2 M] fp32."""

    values: Tensor
    scales: Tensor
    sums: Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0] // 2, self.values.shape[1]


def fp8_rows(x: Tensor, group: int = GROUP) -> Fp8Rows:
    """x [M, K] rounded; group 0: one scale per row."""
    rows, inputs = x.shape
    assert x.is_contiguous()
    values = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    groups = triton.cdiv(inputs, group) if group else 1
    scales = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    width = _WIDTH if group else triton.next_power_of_2(inputs)
    _fp8_rows[(rows, triton.cdiv(inputs, width))](
        x, values, scales, rows, inputs, GROUP=group or width, BLOCK=width,
        num_warps=8 if width > _WIDTH else 4,
    )  # fmt: skip
    return Fp8Rows(values, scales, group)


def integer_rows(x: Tensor, group: int = GROUP) -> IntegerRows:
    """x [M, K] as pairs of rows of integers."""
    rows, inputs = x.shape
    assert x.is_contiguous()
    values = torch.empty(2 * rows, inputs, dtype=torch.int8, device=x.device)
    scales = torch.empty(triton.cdiv(inputs, group), 2 * rows, dtype=torch.float32, device=x.device)
    sums = torch.empty_like(scales)
    _integer_rows[(rows, triton.cdiv(inputs, _WIDTH))](
        x, values, scales, sums, rows, inputs, GROUP=group, BLOCK=_WIDTH, num_warps=4
    )
    return IntegerRows(values, scales, sums, group)


def silu_fp8(product: Tensor, group: int = GROUP) -> Fp8Rows:
    """silu(gate) * up of products [S, M, N] with gate's outputs first, rounded; N / 2 inputs.

    Group 0: one scale per row.
    """
    splits, rows, width = product.shape
    inputs = width // 2
    values = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=product.device)
    groups = triton.cdiv(inputs, group) if group else 1
    scales = torch.empty(groups, rows, dtype=torch.float32, device=product.device)
    block = _WIDTH if group else triton.next_power_of_2(inputs)
    _silu_rows[(rows, triton.cdiv(inputs, block))](
        product, values, scales, None, rows, inputs, SPLITS=splits, GROUP=group or block,
        BLOCK=block, num_warps=16 if block > _WIDTH else 4,
    )  # fmt: skip
    return Fp8Rows(values, scales, group)


def silu_integers(product: Tensor, group: int = GROUP) -> IntegerRows:
    """The same as pairs of rows of integers."""
    splits, rows, width = product.shape
    inputs = width // 2
    values = torch.empty(2 * rows, inputs, dtype=torch.int8, device=product.device)
    groups = triton.cdiv(inputs, group)
    scales = torch.empty(groups, 2 * rows, dtype=torch.float32, device=product.device)
    sums = torch.empty_like(scales)
    _silu_rows[(rows, triton.cdiv(inputs, _WIDTH))](
        product, values, scales, sums, rows, inputs, SPLITS=splits, GROUP=group, BLOCK=_WIDTH,
        num_warps=4,
    )  # fmt: skip
    return IntegerRows(values, scales, sums, group)


@jit
def to_fp8(value, largest):
    """Numbers whose largest magnitude is `largest`, in e4m3, and their scale."""
    scale = tl.maximum(largest, _LEAST) / LARGEST
    steps = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    return steps.to(tl.float8e4nv), scale


@jit
def store_fp8(value, values, scales, row, rows, inputs, first, GROUP: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """BLOCK inputs of a row from number `first` on, which begins a group, in e4m3."""
    GROUPS: tl.constexpr = BLOCK // GROUP
    parts = tl.reshape(value, (GROUPS, GROUP))
    steps, scale = to_fp8(parts, tl.max(tl.abs(parts), 1)[:, None])
    group = tl.arange(0, GROUPS)
    at = first + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(values + row * inputs + at, steps, at < inputs)
    group_at = (first // GROUP + group)[:, None]
    tl.store(scales + group_at * rows + row, scale, group_at * GROUP < inputs)


@jit(do_not_specialize=["rows"])
def _fp8_rows(x, values, scales, rows, inputs, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    value = tl.load(x + row * inputs + at, at < inputs, 0.0).to(tl.float32)
    store_fp8(value, values, scales, row, rows, inputs, first, GROUP, BLOCK)


@jit
def nearest(x):
    """The nearest whole number, halves away from zero."""
    return tl.where(x < 0, -tl.floor(0.5 - x), tl.floor(x + 0.5))


@jit
def store_integers(value, values, scales, sums, row, rows, inputs, first, GROUP: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """BLOCK inputs of a row from number `first` on, as integers and what these leave."""
    GROUPS: tl.constexpr = BLOCK // GROUP
    parts = tl.reshape(value, (GROUPS, GROUP))
    scale = tl.maximum(tl.max(tl.abs(parts), 1), _LEAST)[:, None] / 127.0
    steps = parts / scale
    near = nearest(steps)
    # Remainders lie in half a step either way: 127 instead of 128 is all that is lost.
    fine = tl.minimum(tl.maximum(nearest((steps - near) * FINE), -127.0), 127.0)
    group = tl.arange(0, GROUPS)[:, None]
    at = first + group * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(values + 2 * row * inputs + at, near.to(tl.int8), at < inputs)
    tl.store(values + (2 * row + 1) * inputs + at, fine.to(tl.int8), at < inputs)
    group_at = first // GROUP + group
    where = group_at * 2 * rows + 2 * row
    is_group = group_at * GROUP < inputs
    tl.store(scales + where, scale, is_group)
    tl.store(scales + where + 1, scale * (1.0 / FINE), is_group)
    tl.store(sums + where, tl.sum(near, 1)[:, None], is_group)
    tl.store(sums + where + 1, tl.sum(fine, 1)[:, None], is_group)


@jit(do_not_specialize=["rows"])
def _integer_rows(x, values, scales, sums, rows, inputs, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    value = tl.load(x + row * inputs + at, at < inputs, 0.0).to(tl.float32)
    store_integers(value, values, scales, sums, row, rows, inputs, first, GROUP, BLOCK)


@jit(do_not_specialize=["rows"])
def _silu_rows(product, values, scales, sums, rows, width, SPLITS: tl.constexpr,
               GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    gate = tl.zeros((BLOCK,), dtype=tl.float32)
    up = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        source = product + (split * rows + row) * 2 * width + at
        gate += tl.load(source, at < width, 0.0).to(tl.float32)
        up += tl.load(source + width, at < width, 0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if sums is None:
        store_fp8(value, values, scales, row, rows, width, first, GROUP, BLOCK)
    else:
        store_integers(value, values, scales, sums, row, rows, width, first, GROUP, BLOCK)
