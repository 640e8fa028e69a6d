"""Weights of 4 or 8 bits in groups of inputs, as kernels hold and unpack them.

Weights of 4 bits become bytes in registers, a shift and a mask for four of them. So that nothing
has to change places, a byte holds two inputs that lie `half` apart (`planar`), each minus 8: both
halves of a tile are multiplied by themselves.

N outputs, K inputs, G inputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

_HALVES = (128, 64, 32)
_ROWS = 4096  # repacked at a time
_IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True)
class PackedGroups:
    """W [N, K] as kernels read it: W[n, k] = (q - zero) * scale of its group.

    weight int8: for 4 bits [N, K / 2], bytes of two inputs `half` apart, for 8 bits [N, K], each
    code less 8 or 128; scales [K / G, N]; zeros [K / G, N] int8, less the same, or None. Rows are
    rounded in groups of `half`.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    half: int

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.weight.shape
        return outputs, width * 8 // self.bits

    def rows(self, rows: slice | Tensor) -> PackedGroups:
        """The same of some outputs."""
        zeros = None if self.zeros is None else self.zeros[:, rows].contiguous()
        scales = self.scales[:, rows].contiguous()
        return replace(self, weight=self.weight[rows].contiguous(), scales=scales, zeros=zeros)


def packed_groups(weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> PackedGroups:
    """From codes as they are held: uint8 [N, K / 2], even inputs low, or [N, K]; [N, K / G]."""
    outputs, groups = scales.shape
    inputs = weight.shape[1] * 8 // bits
    group, moved = inputs // groups, 1 << (bits - 1)
    half = half_for(inputs, group, bits)
    assert half is not None, "other groups are refused"
    if bits == 4:
        packed = torch.empty_like(weight)
        for start in range(0, outputs, _ROWS):
            packed[start : start + _ROWS] = planar(weight[start : start + _ROWS], half)
    else:
        packed = weight ^ moved
    if zeros is not None:
        zeros = (zeros.t().to(torch.int16) - moved).to(torch.int8).contiguous()
    return PackedGroups(packed.view(torch.int8), scales.t().contiguous(), zeros, bits, group, half)


def half_for(inputs: int, group: int, bits: int) -> int | None:
    """Inputs of a matrix that are multiplied together; None where groups are too small for it."""
    tile = 8 // bits  # halves of it
    fits = (half for half in _HALVES if group % half == 0 and inputs % (tile * half) == 0)
    return next(fits, None)


def planar(weight: Tensor, half: int) -> Tensor:
    """uint8 [N, K / 2] with neighbours in a byte -> with inputs `half` apart, each minus 8."""
    codes = torch.stack([weight & 15, weight >> 4], 2) ^ 8  # minus 8, in 4 bits
    low, high = codes.view(len(weight), -1, 2, half).unbind(2)
    return (low | (high << 4)).flatten(1)


def dequantized_groups(packed: PackedGroups, dtype: torch.dtype) -> Tensor:
    """W [N, K] in `dtype`, for products of many rows by a library."""
    outputs, inputs = packed.shape
    result = torch.empty(outputs, inputs, dtype=dtype, device=packed.weight.device)
    grid = (triton.cdiv(outputs, 64), triton.cdiv(packed.weight.shape[1], packed.half))
    _dequantize[grid](
        packed.weight, packed.scales, packed.zeros, result, outputs, inputs, GROUP=packed.group,
        HALF=packed.half, IS_PACKED=packed.bits == 4, BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return result


@jit
def halves(packed):
    """Bytes of two 4-bit numbers -> both, 16 times each, as bytes."""
    if _IS_INTERPRETED:
        low = (packed << 4).to(tl.int8)
        high = (packed & -16).to(tl.int8)
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0;"
            " and.b32 $1, $2, 0xF0F0F0F0; }",
            "=r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return low, high


@jit
def codes_of(matrix, first_line, first, lines, width, EVERY: tl.constexpr, LINES: tl.constexpr,
             WIDE: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    """[LINES, WIDE] of a matrix with `lines` lines of `width` bytes; zeros outside of it."""
    line = first_line + tl.arange(0, LINES) * EVERY
    inner = first + tl.arange(0, WIDE)
    mask = line[:, None] < lines
    if not IS_EVEN:
        mask = mask & (inner[None, :] < width)
    return tl.load(matrix + line[:, None].to(tl.int64) * width + inner[None, :], mask, 0)


@jit
def _dequantize(weight, scales, zeros, result, outputs, inputs, GROUP: tl.constexpr,
                HALF: tl.constexpr, IS_PACKED: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    first = tl.program_id(1) * HALF
    if IS_PACKED:
        packed = codes_of(weight, column, first, outputs, inputs // 2, 1, BLOCK_N, HALF, True)
        low, high = halves(packed)
        _store_group(low, scales, zeros, result, column, 2 * first, outputs, inputs, 16, GROUP,
                     HALF, BLOCK_N)  # fmt: skip
        _store_group(high, scales, zeros, result, column, 2 * first + HALF, outputs, inputs, 16,
                     GROUP, HALF, BLOCK_N)  # fmt: skip
    else:
        codes = codes_of(weight, column, first, outputs, inputs, 1, BLOCK_N, HALF, True)
        _store_group(codes, scales, zeros, result, column, first, outputs, inputs, 1, GROUP, HALF,
                     BLOCK_N)  # fmt: skip


@jit
def _store_group(codes, scales, zeros, result, column, first, outputs, inputs, steps,
                 GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    columns = column + tl.arange(0, BLOCK_N)
    inner = first + tl.arange(0, WIDTH)
    is_output = columns < outputs
    at = first // GROUP * outputs + columns  # all of one group: halves divide it
    value = codes.to(tl.float32) / steps
    if zeros is not None:
        value -= tl.load(zeros + at, is_output, 0).to(tl.float32)[:, None]
    value *= tl.load(scales + at, is_output, 0.0).to(tl.float32)[:, None]
    target = result + columns[:, None].to(tl.int64) * inputs + inner[None, :]
    mask = is_output[:, None] & (inner[None, :] < inputs)
    tl.store(target, value.to(result.dtype.element_ty), mask)
