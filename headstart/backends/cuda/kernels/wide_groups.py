"""x W^T of more than a few rows with weights of 4 bits in groups, on the matrix units for floats.

Codes become bf16 in registers: a word holds four codes of each of two neighbouring columns, and a
shift and a mask with the exponent of 128 behind it make a pair of numbers, each 136 more than its
code means without a zero point. Nothing is taken from them: 136 plus the zero point, times the sum
of a row's inputs, is what a group has too much, and one small product takes it from all groups
together. The sums of a group get its scale in fp32. So rows keep all their bits, a row costs one
product instead of the two of a pair of integers (`groups.py`), and nothing but sums is converted.

A word of 16 bits has codes of four columns that do not follow one another (`group_packing.planar`):
even ones, then odd ones of each `half` inputs. Rows are laid out in that order first
(`PartedRows`).

M rows, N outputs, K inputs, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.group_packing import PackedGroups
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import tile_rows
from headstart.backends.cuda.kernels.streamed import has_copy_engine

TILE_ROWS = (32, 64, 128)
# Up to MOST_FEW rows a pair of integers each is fewer instructions. Of more than MOST_WIDE, copies
# of the weights for a library took less time on an H200 (`benchmarks/gpu_wide_groups.py`).
MOST_FEW, MOST_WIDE = 16, 128
_PROCESSORS = 132  # of an H200
_SPLITS = (1, 2, 3, 4, 6, 8)
# Programs of 64 outputs on one processor -> how long a step of all of them takes; no more fit.
_SHARED = {1: 1.35, 2: 2.0, 3: 2.8}
_STEPS_OF_A_START = 2  # until its first weights are there, and for what is taken away at its end
_WIDTH = 1024  # inputs that a program lays out
_HALVES = tl.constexpr(16)  # whose excess is taken away together
_IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True)
class WideCut:
    """How a product is cut up: outputs of a program, splits, warps, stages, rows of a tile."""

    outputs: int = 128
    splits: int = 1
    warps: int = 8
    stages: int = 3
    registers: int | None = None  # of a thread at most; None: as many as the compiler likes
    rows: int | None = None  # None: by how many there are


@dataclass(frozen=True)
class PartedRows:
    """values [M, K] in the type of the model: of each `half` inputs the even ones, then the odd.

    sums [M, K / half] fp32: of the inputs of each half.
    """

    values: Tensor
    sums: Tensor
    half: int

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def parted_rows(x: Tensor, half: int) -> PartedRows:
    """x [M, K] laid out so."""
    assert x.is_contiguous()
    return _parted(x.unsqueeze(0), half, x.dtype, is_gated=False)


def parted_silu(product: Tensor, half: int, dtype: torch.dtype) -> PartedRows:
    """silu(gate) * up of products [S, M, N], gate's outputs first, laid out so; N / 2 inputs."""
    return _parted(product, half, dtype, is_gated=True)


def _parted(source: Tensor, half: int, dtype: torch.dtype, *, is_gated: bool) -> PartedRows:
    splits, rows, width = source.shape
    inputs = width // 2 if is_gated else width
    values = torch.empty(rows, inputs, dtype=dtype, device=source.device)
    sums = torch.empty(rows, inputs // half, dtype=torch.float32, device=source.device)
    _part[(rows, triton.cdiv(inputs, _WIDTH))](
        source, values, sums, rows, inputs, SPLITS=splits, HALF=half, IS_GATED=is_gated,
        BLOCK=_WIDTH, num_warps=4,
    )  # fmt: skip
    return PartedRows(values, sums, half)


def takes_wide(packed: PackedGroups, rows: int, dtype: torch.dtype) -> bool:
    """Whether so many rows in `dtype` are multiplied here: measured on Hopper only."""
    if packed.bits != 4 or not MOST_FEW < rows <= MOST_WIDE:
        return False
    if triton.knobs.runtime.interpret:
        return True
    return dtype == torch.bfloat16 and has_copy_engine(packed.weight.device)


def partial_wide(x: PartedRows, packed: PackedGroups, cut: WideCut | None = None) -> Tensor:
    """x [M, K] -> [S, M, N] fp32, whose sum over S is x W^T; of 4 bits."""
    assert packed.bits == 4 and x.half == packed.half and packed.weight.is_contiguous()
    rows, inputs = x.shape
    outputs = packed.shape[0]
    cut = cut or wide_cut(outputs, inputs, rows)
    deep = 2 * packed.half
    tile = cut.rows or tile_rows(rows, TILE_ROWS)
    result = torch.empty(cut.splits, rows, outputs, dtype=torch.float32, device=x.values.device)
    per_split = triton.cdiv(inputs // deep, cut.splits) * deep
    grid = (triton.cdiv(outputs, cut.outputs), cut.splits, triton.cdiv(rows, tile))
    options: dict[str, Any] = {"num_warps": cut.warps, "num_stages": cut.stages}
    if cut.registers is not None:
        options["maxnreg"] = cut.registers
    _linear[grid](
        x.values, x.sums, packed.weight.view(torch.int16), packed.scales, packed.zeros, result,
        rows, outputs, inputs, per_split, GROUP=packed.group, HALF=packed.half, BLOCK_M=tile,
        BLOCK_N=cut.outputs, **options,
    )  # fmt: skip
    return result


def wide_cut(outputs: int, inputs: int, rows: int) -> WideCut:
    """By rule, from the best cuts on an H200 at 32, 64 and 128 rows."""
    tile = tile_rows(rows, TILE_ROWS)
    if tile > 64:  # sums fill the registers of eight warps: one program for each processor
        tiles = triton.cdiv(outputs, 128) * triton.cdiv(rows, tile)
        fits = [splits for splits in _SPLITS if tiles * splits <= _PROCESSORS]
        return WideCut(128, max(fits, default=1), warps=8, stages=3)
    tiles, most = triton.cdiv(outputs, 64), max(_SHARED)

    def cost(splits: int) -> float:
        each = triton.cdiv(triton.cdiv(inputs, 256), splits) + _STEPS_OF_A_START
        waves, left = divmod(triton.cdiv(tiles * splits, _PROCESSORS), most)
        return float(each * (waves * _SHARED[most] + _SHARED.get(left, 0.0)))

    splits = min(_SPLITS, key=cost)
    if tile == 64 and tiles * splits > 2 * _PROCESSORS:  # room for a third one
        return WideCut(64, splits, warps=4, stages=2, registers=168)
    return WideCut(64, splits, warps=4, stages=3)


@jit(do_not_specialize=["rows"])
def _part(source, result, sums, rows, width, SPLITS: tl.constexpr, HALF: tl.constexpr,
          IS_GATED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
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
    kept = value.to(result.dtype.element_ty)
    place = at // HALF * HALF + at % 2 * (HALF // 2) + at % HALF // 2
    tl.store(result + row * width + place, kept, mask)
    halves = tl.arange(0, BLOCK // HALF)
    total = tl.sum(tl.reshape(kept.to(tl.float32), (BLOCK // HALF, HALF)), 1)
    tl.store(sums + row * (width // HALF) + first // HALF + halves, total,
             first + halves * HALF < width)  # fmt: skip


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
        # 0x6A: (a & b) ^ c.
        first, second, third, last = tl.inline_asm_elementwise(
            "{ .reg .b32 t; lop3.b32 $0, $4, 0x000F000F, 0x43084308, 0x6A;"
            " shr.u32 t, $4, 8; lop3.b32 $1, t, 0x000F000F, 0x43084308, 0x6A;"
            " shr.u32 t, $4, 4; lop3.b32 $2, t, 0x000F000F, 0x43084308, 0x6A;"
            " shr.u32 t, $4, 12; lop3.b32 $3, t, 0x000F000F, 0x43084308, 0x6A; }",
            "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return first.to(KIND), second.to(KIND), third.to(KIND), last.to(KIND)


@jit
def _gain(scales, first, stop, source, is_output, scale_stride, GROUP: tl.constexpr):
    """Scales of the group that begins with input `first`; zero from `stop` on."""
    is_there = is_output & (source * 0 + first < stop)
    return tl.load(scales + first // GROUP * scale_stride + source, is_there, 0.0)


@jit
def _times(even, odd, x, first, row, is_row, width, HALF: tl.constexpr):
    """Sums over the `HALF` inputs from number `first` on, without a scale."""
    inner = first + tl.arange(0, HALF // 2)
    source = x + row[:, None].to(tl.int64) * width + inner[None, :]
    near = tl.load(source, is_row[:, None], 0.0)
    far = tl.load(source + HALF // 2, is_row[:, None], 0.0)
    return tl.dot(odd, far.T, tl.dot(even, near.T))


@jit
def _excess(x_sums, scales, zeros, start, stop, row, is_row, width, source, is_output,
            scale_stride, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr):  # fmt: skip
    """What codes are too large by, summed over inputs [start, stop)."""
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for begin in tl.range(start // HALF, stop // HALF, _HALVES, num_stages=1):
        half = begin + tl.arange(0, _HALVES)
        is_half = half < stop // HALF
        at = (half * HALF // GROUP)[None, :] * scale_stride + source[:, None]
        is_code = is_half[None, :] & is_output[:, None]
        more = tl.load(scales + at, is_code, 0.0).to(tl.float32)
        if zeros is None:
            more *= 136.0
        else:
            more *= tl.load(zeros + at, is_code, 0).to(tl.float32) + 136.0
        where = row[:, None] * (width // HALF) + half[None, :]
        total = tl.load(x_sums + where, is_half[None, :] & is_row[:, None], 0.0)
        sums = tl.dot(more, total.T, sums, input_precision="tf32x3")
    return sums


@jit
def wide_sums(x, x_sums, lines, scales, zeros, start, stop, row, is_row, width, source, is_output,
              scale_stride, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr):  # fmt: skip
    """[BLOCK_N, BLOCK_M]: products of the rows `row` of x [.., width] over inputs [start, stop).

    lines [BLOCK_N, 1]: where the words of each output begin; `source`: which columns of `scales`
    and `zeros`, that are `scale_stride` wide, are these outputs.
    """
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    gain = _gain(scales, start, stop, source, is_output, scale_stride, GROUP)
    later_gain = _gain(scales, start + HALF, stop, source, is_output, scale_stride, GROUP)
    for first in range(start, stop, 2 * HALF):
        inner = first // 4 + tl.arange(0, HALF // 2)
        words = tl.load(lines + inner[None, :], is_output[:, None], 0)
        # Scales are loaded a step before they are needed: loops do not fetch them ahead.
        then = _gain(scales, first + 2 * HALF, stop, source, is_output, scale_stride, GROUP)
        later_then = _gain(scales, first + 3 * HALF, stop, source, is_output, scale_stride, GROUP)
        even, odd, later_even, later_odd = _quarters(words, x.dtype.element_ty)
        part = _times(even, odd, x, first, row, is_row, width, HALF)
        sums += part * gain.to(tl.float32)[:, None]
        part = _times(later_even, later_odd, x, first + HALF, row, is_row, width, HALF)
        sums += part * later_gain.to(tl.float32)[:, None]
        gain, later_gain = then, later_then
    return sums - _excess(x_sums, scales, zeros, start, stop, row, is_row, width, source,
                          is_output, scale_stride, GROUP, HALF, BLOCK_M, BLOCK_N)  # fmt: skip


@jit(do_not_specialize=["rows"])
def _linear(x, x_sums, weight, scales, zeros, result, rows, outputs, inputs, per_split,
            GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    start = split * per_split
    stop = tl.minimum(start + per_split, inputs)
    lines = weight + columns[:, None].to(tl.int64) * (inputs // 4)
    sums = wide_sums(x, x_sums, lines, scales, zeros, start, stop, row, row < rows, inputs, columns,
                     columns < outputs, outputs, GROUP, HALF, BLOCK_M, BLOCK_N)  # fmt: skip
    where = (split * rows + row[None, :]) * outputs + columns[:, None]
    tl.store(result + where, sums, (columns[:, None] < outputs) & (row[None, :] < rows))
