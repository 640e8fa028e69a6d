"""x W^T of more than a few rows with weights of 4 bits in groups, on the matrix units for floats.

Codes become bf16 in registers: a word holds four codes of each of two neighbouring columns, and a
shift, a mask and the exponent of 128 in front of it make a pair of numbers of four bits each. They
lose their zero point, exactly; the sums of a group get its scale in fp32. So rows keep all their
bits, a row costs one product instead of the two of a pair of integers (`groups.py`), and nothing
but the sums is converted.

A word of 16 bits has codes of four columns that do not follow one another (`group_packing.planar`):
even ones, then odd ones of each `half` inputs. Rows are laid out in that order first
(`PartedRows`).

M rows, N outputs, K inputs, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.group_packing import PackedGroups
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape, splits_for, tile_rows

TILE_ROWS = (32, 64, 128)
# Up to MOST_FEW rows a pair of integers each is fewer instructions; beyond MOST_WIDE a copy of the
# weights for a library is the less work. By counting, not by time.
MOST_FEW, MOST_WIDE = 16, 512
# It ran interpreted and was compiled for Hopper; `kernels/groups.py` multiplies these rows on GPUs
# until `benchmarks/gpu_wide_groups.py` has shown on one that this is right and faster.
IS_SHOWN_ON_GPUS = False
_WIDTH = 1024  # inputs that a program lays out
_IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True)
class PartedRows:
    """values [M, K] in the type of the model: of each `half` inputs the even ones, then the odd."""

    values: Tensor
    half: int

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def parted_rows(x: Tensor, half: int) -> PartedRows:
    """x [M, K] laid out so."""
    assert x.is_contiguous()
    rows, inputs = x.shape
    result = torch.empty_like(x)
    grid = (rows, triton.cdiv(inputs, _WIDTH))
    _part[grid](
        x, result, rows, inputs, SPLITS=1, HALF=half, IS_GATED=False, BLOCK=_WIDTH, num_warps=4
    )
    return PartedRows(result, half)


def parted_silu(product: Tensor, half: int, dtype: torch.dtype) -> PartedRows:
    """silu(gate) * up of products [S, M, N], gate's outputs first, laid out so; N / 2 inputs."""
    splits, rows, width = product.shape
    result = torch.empty(rows, width // 2, dtype=dtype, device=product.device)
    grid = (rows, triton.cdiv(width // 2, _WIDTH))
    _part[grid](
        product, result, rows, width // 2, SPLITS=splits, HALF=half, IS_GATED=True, BLOCK=_WIDTH,
        num_warps=4,
    )  # fmt: skip
    return PartedRows(result, half)


def takes_wide(packed: PackedGroups, rows: int, dtype: torch.dtype) -> bool:
    """Whether so many rows in `dtype` are multiplied here."""
    is_own = triton.knobs.runtime.interpret or (IS_SHOWN_ON_GPUS and dtype == torch.bfloat16)
    return packed.bits == 4 and is_own and MOST_FEW < rows <= MOST_WIDE


def partial_wide(x: PartedRows, packed: PackedGroups, shape: Shape | None = None) -> Tensor:
    """x [M, K] -> [S, M, N] fp32, whose sum over S is x W^T; of 4 bits."""
    assert packed.bits == 4 and x.half == packed.half and packed.weight.is_contiguous()
    rows, inputs = x.shape
    outputs = packed.shape[0]
    shape = shape or wide_shape(outputs, inputs, rows)
    deep = 2 * packed.half
    tile = shape.rows or tile_rows(rows, TILE_ROWS)
    result = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x.values.device)
    per_split = triton.cdiv(inputs // deep, shape.splits) * deep
    grid = (triton.cdiv(outputs, shape.outputs), shape.splits, triton.cdiv(rows, tile))
    _linear[grid](
        x.values, packed.weight.view(torch.int16), packed.scales, packed.zeros, result, rows,
        outputs, inputs, per_split, GROUP=packed.group, HALF=packed.half, BLOCK_M=tile,
        BLOCK_N=shape.outputs, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return result


def wide_shape(outputs: int, inputs: int, rows: int) -> Shape:
    """By counting: tiles of 128 outputs read the rows half as often as tiles of 64 would."""
    splits = splits_for(outputs, inputs, columns=128, programs=132, least=1024)
    return Shape(128, 256, splits, warps=8, stages=3 if rows <= 64 else 2)


@jit(do_not_specialize=["rows"])
def _part(source, result, rows, width, SPLITS: tl.constexpr, HALF: tl.constexpr,
          IS_GATED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    value = tl.zeros((BLOCK,), dtype=tl.float32)
    up = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        line = split * rows + row
        if IS_GATED:
            value += tl.load(source + line * 2 * width + at, mask, 0.0).to(tl.float32)
            up += tl.load(source + (line * 2 + 1) * width + at, mask, 0.0).to(tl.float32)
        else:
            value += tl.load(source + line * width + at, mask, 0.0).to(tl.float32)
    if IS_GATED:
        value = value * tl.sigmoid(value) * up
    place = at // HALF * HALF + at % 2 * (HALF // 2) + at % HALF // 2
    tl.store(result + row * width + place, value.to(result.dtype.element_ty), mask)


@jit
def _quarters(words, KIND: tl.constexpr):
    """Words of four codes -> of each 136 plus what the code means without its zero point.

    In the order of their columns: even and odd ones of the first half, and of the second.
    """
    if _IS_INTERPRETED:
        bits = words.to(tl.int32)
        first = ((bits & 15) ^ 8) + 128
        second = (((bits >> 8) & 15) ^ 8) + 128
        third = (((bits >> 4) & 15) ^ 8) + 128
        last = (((bits >> 12) & 15) ^ 8) + 128
    else:
        first, second, third, last = tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 t, $4, 0x000F000F; xor.b32 $0, t, 0x43084308;"
            " shr.u32 t, $4, 8; and.b32 t, t, 0x000F000F; xor.b32 $1, t, 0x43084308;"
            " shr.u32 t, $4, 4; and.b32 t, t, 0x000F000F; xor.b32 $2, t, 0x43084308;"
            " shr.u32 t, $4, 12; and.b32 t, t, 0x000F000F; xor.b32 $3, t, 0x43084308; }",
            "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return first.to(KIND), second.to(KIND), third.to(KIND), last.to(KIND)


@jit
def _add_group(sums, even, odd, x, scales, zeros, first, row, rows, columns, outputs, inputs,
               GROUP: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """sums and what the inputs from number `first` on add to them."""
    at = first // GROUP * outputs + columns
    is_output = columns < outputs
    gain = tl.load(scales + at, is_output, 0.0).to(tl.float32)
    if zeros is None:
        even -= 136.0
        odd -= 136.0
    else:
        zero = (tl.load(zeros + at, is_output, 0).to(tl.float32) + 136.0).to(even.dtype)
        even -= zero[:, None]
        odd -= zero[:, None]
    inner = first + tl.arange(0, HALF // 2)
    source = x + row[:, None].to(tl.int64) * inputs + inner[None, :]
    is_row = (row < rows)[:, None]
    near = tl.load(source, is_row, 0.0)
    far = tl.load(source + HALF // 2, is_row, 0.0)
    part = tl.dot(even, near.T)
    part = tl.dot(odd, far.T, part)
    return sums + part * gain[:, None]


@jit(do_not_specialize=["rows"])
def _linear(x, weight, scales, zeros, result, rows, outputs, inputs, per_split,
            GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    start = split * per_split
    stop = tl.minimum(start + per_split, inputs)
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    lines = weight + columns[:, None].to(tl.int64) * (inputs // 4)
    for first in range(start, stop, 2 * HALF):
        inner = first // 4 + tl.arange(0, HALF // 2)
        words = tl.load(lines + inner[None, :], (columns < outputs)[:, None], 0)
        even, odd, later_even, later_odd = _quarters(words, x.dtype.element_ty)
        sums = _add_group(sums, even, odd, x, scales, zeros, first, row, rows, columns, outputs,
                          inputs, GROUP, HALF)  # fmt: skip
        sums = _add_group(sums, later_even, later_odd, x, scales, zeros, first + HALF, row, rows,
                          columns, outputs, inputs, GROUP, HALF)  # fmt: skip
    where = (split * rows + row[None, :]) * outputs + columns[:, None]
    tl.store(result + where, sums, (columns[:, None] < outputs) & (row[None, :] < rows))
