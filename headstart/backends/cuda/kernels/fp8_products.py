"""x W^T of 8-bit floats on both sides: half the bytes of bf16, and nothing to convert.

Weights are e4m3 with one scale per output, or per block of 128 x 128; rows as `eight_bits.py`
makes them. A step's product is added up by the matrix units, which keep few bits; steps are added
in fp32. Scales of groups and blocks are applied to a step's sums, those of rows to the whole.

Tiles are fetched by the threads, or by the GPU's copy engine (`streamed.py`). As in `linear.py` the
inner dimension may be cut into splits, whose sums the kernel that reads them adds in a fixed order.

M rows, N outputs, K inputs, S splits, G inputs of a group.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headstart.backends.cuda.kernels.choice import best_of_rows, best_of_values
from headstart.backends.cuda.kernels.eight_bits import Fp8Rows
from headstart.backends.cuda.kernels.fp8_tiles import (
    BLOCK,
    matrix_tile,
    product_tile,
    step_scale,
    whole_scale,
)
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape, splits_for, tile_rows
from headstart.backends.cuda.kernels.streamed import has_copy_engine

TILE_ROWS = (16, 32, 64, 128)
# For `gated_fp8`: sums of two products fill the registers, and more so where steps are scaled.
MAX_FUSED_ROWS = {False: 128, True: 64}  # by whether scales are of blocks
_COPIED = 16  # bytes that the copy engine fetches at least
_FEW_ROWS, _SOME_ROWS = TILE_ROWS[0], TILE_ROWS[2]

# (N, K, whether scales are of blocks) -> the cut that was fastest on an H200 at 4 to 16 rows, and
# whether the copy engine fetches its tiles (`benchmarks/gpu_quantized.py`); others are by rule.
MEASURED = {
    (6144, 4096, False): (Shape(64, 128, splits=4, warps=4, stages=4), False),
    (4096, 4096, False): (Shape(64, 256, splits=4, warps=4, stages=3), False),
    (4096, 11008, False): (Shape(64, 256, splits=4, warps=4, stages=4), True),
}


def partial_fp8(
    x: Fp8Rows, weight: Tensor, scales: Tensor, shape: Shape | None = None, *,
    streams: bool = False, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """x [M, K], weight [N, K] e4m3, scales [N] or [N / 128, K / 128] -> [S, M, N] in `dtype`."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if shape is None:
        shape, streams = cut_for(weight, rows, is_blocked=scales.dim() == 2)
    tile = shape.rows or tile_rows(rows, TILE_ROWS)
    result = torch.empty(shape.splits, rows, outputs, dtype=dtype, device=weight.device)
    per_split = triton.cdiv(triton.cdiv(inputs, shape.inputs), shape.splits) * shape.inputs
    grid = (triton.cdiv(outputs, shape.outputs), shape.splits, triton.cdiv(rows, tile))
    operands, sizes = _operands(x, weight, scales, shape, tile, streams=streams)
    _linear[grid](*operands, result, rows, outputs, inputs, per_split, **sizes)
    return result


def gated_fp8(
    x: Fp8Rows, weight: Tensor, scales: Tensor, shape: Shape | None = None, *,
    dtype: torch.dtype, streams: bool = False,
) -> Tensor:  # fmt: skip
    """silu(x G^T) * (x U^T) [M, N / 2] in `dtype`; weight [N, K] holds G's rows, then U's."""
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    if shape is None:
        shape, streams = _gated_cut(weight, rows)
    tile = shape.rows or tile_rows(rows, TILE_ROWS)
    result = torch.empty(rows, outputs, dtype=dtype, device=weight.device)
    operands, sizes = _operands(x, weight, scales, shape, tile, streams=streams)
    _gated[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, tile))](
        *operands, result, rows, outputs, inputs, **sizes
    )
    return result


def choose_fp8(
    x: Fp8Rows, weight: Tensor, scales: Tensor, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
    token_ids: Tensor | None = None, shape: Shape | None = None, *, streams: bool = False,
) -> Tensor:  # fmt: skip
    """`choice.choose_rows` with such weights."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if shape is None:
        shape, streams = cut_for(weight, rows, is_blocked=scales.dim() == 2)
    tiles = triton.cdiv(outputs, shape.outputs)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=weight.device)
    where = torch.empty(rows, tiles, dtype=torch.int32, device=weight.device)
    tile = shape.rows or tile_rows(rows, TILE_ROWS)
    operands, sizes = _operands(x, weight, scales, shape, tile, streams=streams)
    _best_of_tile[(tiles, triton.cdiv(rows, tile))](
        *operands, inv_temps, seeds, positions, token_ids if token_ids is not None else where, best,
        where, rows, outputs, inputs, tiles, HAS_IDS=token_ids is not None, **sizes,
    )  # fmt: skip
    return best_of_rows(best, where)


def cut_for(weight: Tensor, rows: int, *, is_blocked: bool) -> tuple[Shape, bool]:
    """How a product with weight [N, K] is cut up, and whether the copy engine fetches its tiles."""
    outputs, inputs = weight.shape
    if rows <= _FEW_ROWS and (outputs, inputs, is_blocked) in MEASURED:
        return MEASURED[outputs, inputs, is_blocked]
    if rows > TILE_ROWS[-1]:  # arithmetic takes the time
        return Shape(128, 128, splits=1, warps=8, stages=4), can_stream(weight)
    # Sums of many rows are many bytes, too: fewer splits.
    programs = 256 if rows <= _SOME_ROWS else 192
    splits = splits_for(outputs, inputs, programs=programs, least=1024)
    stages = 6 if rows <= _FEW_ROWS else 4
    return Shape(64, 128, splits, warps=4, stages=stages), can_stream(weight)


def _gated_cut(weight: Tensor, rows: int) -> tuple[Shape, bool]:
    """The same for `gated_fp8`."""
    if rows <= _FEW_ROWS:
        return Shape(64, 256, warps=4, stages=3), False
    if rows <= _SOME_ROWS:
        return Shape(64, 128, warps=4, stages=4), can_stream(weight)
    return Shape(128, 128, warps=8, stages=4), can_stream(weight)


def can_stream(weight: Tensor) -> bool:
    """Whether the copy engine fetches tiles of this matrix."""
    return weight.shape[1] % _COPIED == 0 and has_copy_engine(weight.device)


def _operands(
    x: Fp8Rows, weight: Tensor, scales: Tensor, shape: Shape, tile: int, *, streams: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What every kernel here gets: x, its scales, the weight, its scales; and sizes."""
    assert x.values.is_contiguous() and weight.is_contiguous() and scales.is_contiguous()
    is_blocked = scales.dim() == 2
    assert x.group or not is_blocked, "blocks of weights go with groups of inputs"
    deep = min(x.group or shape.inputs, shape.inputs)
    assert shape.inputs % deep == 0 and BLOCK % shape.outputs == 0
    inputs = weight.shape[1]
    values: Any = x.values
    matrix: Any = weight
    if streams:
        values = TensorDescriptor.from_tensor(x.values, [tile, deep])
        matrix = TensorDescriptor.from_tensor(weight, [shape.outputs, deep])
    sizes = {
        "GROUP": x.group, "IS_BLOCKED": is_blocked, "STREAMS": streams, "BLOCK_M": tile,
        "BLOCK_N": shape.outputs, "BLOCK_K": shape.inputs, "DEEP": deep,
        "IS_EVEN": inputs % shape.inputs == 0, "num_warps": shape.warps,
        "num_stages": shape.stages,
    }  # fmt: skip
    return (values, x.scales, matrix, scales), sizes


@jit(do_not_specialize=["rows"])
def _linear(x, x_scales, weight, scales, result, rows, outputs, inputs, per_split,
            GROUP: tl.constexpr, IS_BLOCKED: tl.constexpr, STREAMS: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
            DEEP: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    first_row = tl.program_id(2) * BLOCK_M
    start = split * per_split
    stop = tl.minimum(start + per_split, inputs)
    sums = product_tile(
        x, x_scales, weight, scales, first_row, rows, column, outputs, inputs, start, stop, GROUP,
        IS_BLOCKED, STREAMS, BLOCK_M, BLOCK_N, BLOCK_K, DEEP, IS_EVEN,
    )  # fmt: skip
    columns = column + tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_M)
    where = (split * rows + row[None, :]) * outputs + columns[:, None]
    mask = (columns[:, None] < outputs) & (row[None, :] < rows)
    tl.store(result + where, sums.to(result.dtype.element_ty), mask)


@jit(do_not_specialize=["rows"])
def _gated(x, x_scales, weight, scales, result, rows, outputs, inputs,
           GROUP: tl.constexpr, IS_BLOCKED: tl.constexpr, STREAMS: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
           DEEP: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    first_row = tl.program_id(1) * BLOCK_M
    both = 2 * outputs
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for begin in range(0, inputs, BLOCK_K):
        for part in tl.static_range(BLOCK_K // DEEP):
            first = begin + part * DEEP
            g = matrix_tile(weight, column, first, both, inputs, STREAMS, BLOCK_N, DEEP, IS_EVEN)
            u = matrix_tile(weight, outputs + column, first, both, inputs, STREAMS, BLOCK_N, DEEP,
                      IS_EVEN)  # fmt: skip
            v = matrix_tile(x, first_row, first, rows, inputs, STREAMS, BLOCK_M, DEEP, IS_EVEN)
            if GROUP:
                scale = step_scale(
                    x_scales, scales, first, first_row, rows, column, both, inputs, GROUP,
                    IS_BLOCKED, BLOCK_M, IS_EVEN,
                )  # fmt: skip
                gate += tl.dot(g, v.T, max_num_imprecise_acc=DEEP) * scale[None, :]
                if IS_BLOCKED:
                    scale = step_scale(
                        x_scales, scales, first, first_row, rows, outputs + column, both, inputs,
                        GROUP, IS_BLOCKED, BLOCK_M, IS_EVEN,
                    )  # fmt: skip
                up += tl.dot(u, v.T, max_num_imprecise_acc=DEEP) * scale[None, :]
            else:
                gate = tl.dot(g, v.T, gate, max_num_imprecise_acc=DEEP)
                up = tl.dot(u, v.T, up, max_num_imprecise_acc=DEEP)
    gate = whole_scale(
        gate, x_scales, scales, first_row, rows, column, both, GROUP, IS_BLOCKED, BLOCK_M, BLOCK_N
    )
    up = whole_scale(
        up, x_scales, scales, first_row, rows, outputs + column, both, GROUP, IS_BLOCKED, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    value = gate * tl.sigmoid(gate) * up
    columns = column + tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_M)
    where = row[None, :].to(tl.int64) * outputs + columns[:, None]
    mask = (columns[:, None] < outputs) & (row[None, :] < rows)
    tl.store(result + where, value.to(result.dtype.element_ty), mask)


@jit(do_not_specialize=["rows"])
def _best_of_tile(x, x_scales, weight, scales, inv_temps, seeds, positions, ids, best, where, rows,
                  outputs, inputs, tiles, HAS_IDS: tl.constexpr, GROUP: tl.constexpr,
                  IS_BLOCKED: tl.constexpr, STREAMS: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEEP: tl.constexpr,
                  IS_EVEN: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    column = tile * BLOCK_N
    first_row = tl.program_id(1) * BLOCK_M
    logits = product_tile(
        x, x_scales, weight, scales, first_row, rows, column, outputs, inputs, 0, inputs, GROUP,
        IS_BLOCKED, STREAMS, BLOCK_M, BLOCK_N, BLOCK_K, DEEP, IS_EVEN,
    )  # fmt: skip
    columns = column + tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_M)
    best_of_values(
        logits, columns, row, inv_temps, seeds, positions, ids, best, where, rows, outputs, tiles,
        tile, HAS_IDS,
    )  # fmt: skip
