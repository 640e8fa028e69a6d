"""x W^T for some rows, 17 to 80: the weights are still what takes the time, and are read once.

More rows than `linear.py` is for want larger tiles, whose addresses would fill the registers. Here
the GPU's copy engine fetches tiles by descriptors instead (from Hopper on). As there, the inner
dimension may be cut into splits, whose sums the kernel that reads them adds in a fixed order.

A tile has 32 or 64 rows; a second, smaller one takes what is left, since multiplying rows that are
not there would take longer than reading weights.

M rows, N outputs, K inputs, S splits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape, splits_for

# Rows of the tile and of the second one.
_TILES = ((32, 0), (64, 0), (64, 16))
MIN_ROWS, MAX_ROWS = 17, sum(_TILES[-1])
_COPIED = 8  # numbers of 16 bits: what the copy engine fetches at least
_CAPABLE = (9, 10)  # Hopper, and Blackwell's data centre GPUs: others have less shared memory
_PROCESSORS = 128  # that a GPU of this size has, or a few more


def streamed_linear(x: Tensor, weight: Tensor, shape: Shape | None = None) -> Tensor:
    """x [M, K], weight [N, K] -> [S, M, N] fp32, whose sum over S is x W^T."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    shape = shape or shape_for(outputs, inputs)
    tile, rest = _tiles_for(rows)
    result = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x.device)
    per_split = triton.cdiv(triton.cdiv(inputs, shape.inputs), shape.splits) * shape.inputs
    _linear[(triton.cdiv(outputs, shape.outputs), shape.splits)](
        _tiles(x, tile, shape.inputs), _tiles(x, rest or tile, shape.inputs),
        _tiles(weight, shape.outputs, shape.inputs), result, rows, outputs, inputs, per_split,
        BLOCK_M=tile, REST=rest, BLOCK_N=shape.outputs, BLOCK_K=shape.inputs,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return result


def streamed_gated(x: Tensor, weight: Tensor, shape: Shape | None = None) -> Tensor:
    """silu(x G^T) * (x U^T) [M, N / 2] in x's type; weight [N, K] holds G's rows, then U's."""
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    shape = shape or Shape(outputs=64, inputs=64, warps=4, stages=4)
    tile, rest = _tiles_for(rows)
    result = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _gated[(triton.cdiv(outputs, shape.outputs),)](
        _tiles(x, tile, shape.inputs), _tiles(x, rest or tile, shape.inputs),
        _tiles(weight, shape.outputs, shape.inputs), result, rows, outputs, inputs,
        BLOCK_M=tile, REST=rest, BLOCK_N=shape.outputs, BLOCK_K=shape.inputs,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return result


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels here are for these matrices, on this device."""
    if not MIN_ROWS <= x.shape[0] <= MAX_ROWS or x.element_size() != 2 or x.dtype != weight.dtype:
        return False
    return weight.shape[1] % _COPIED == 0 and has_copy_engine(x.device)


@cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether descriptors work there, with room for the tiles; the interpreter has both."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in _CAPABLE


def shape_for(outputs: int, inputs: int) -> Shape:
    """By rule, from the best cuts of MiMo-7B's matrices at 32 and 64 rows on an H200."""
    splits = splits_for(outputs, inputs, programs=_PROCESSORS, least=1024)
    is_one_each = triton.cdiv(outputs, 64) * splits <= _PROCESSORS
    # A processor with one program has room for more that is under way.
    return Shape(64, 128, splits, warps=4, stages=5 if is_one_each else 3)


def _tiles_for(rows: int) -> tuple[int, int]:
    return next(tiles for tiles in _TILES if rows <= sum(tiles))


def _tiles(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine needs to know; beyond the matrix it reads zeros."""
    assert matrix.is_contiguous()
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@jit(do_not_specialize=["rows"])
def _linear(x, x_rest, weight, result, rows, outputs, inputs, per_split, BLOCK_M: tl.constexpr,
            REST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    start = split * per_split
    stop = tl.minimum(start + per_split, inputs)
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if REST:
        sums_rest = tl.zeros((BLOCK_N, REST), dtype=tl.float32)
    for first in range(start, stop, BLOCK_K):
        w = weight.load([column, first])
        sums = tl.dot(w, x.load([0, first]).T, sums, input_precision="ieee")
        if REST:
            v = x_rest.load([BLOCK_M, first])
            sums_rest = tl.dot(w, v.T, sums_rest, input_precision="ieee")
    target = result + split.to(tl.int64) * rows * outputs
    _store(target, sums, column, 0, rows, outputs)
    if REST:
        _store(target, sums_rest, column, BLOCK_M, rows, outputs)


@jit(do_not_specialize=["rows"])
def _gated(x, x_rest, weight, result, rows, outputs, inputs, BLOCK_M: tl.constexpr,
           REST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if REST:
        gate_rest = tl.zeros((BLOCK_N, REST), dtype=tl.float32)
        up_rest = tl.zeros((BLOCK_N, REST), dtype=tl.float32)
    for first in range(0, inputs, BLOCK_K):
        g = weight.load([column, first])
        u = weight.load([outputs + column, first])
        v = x.load([0, first])
        gate = tl.dot(g, v.T, gate, input_precision="ieee")
        up = tl.dot(u, v.T, up, input_precision="ieee")
        if REST:
            v = x_rest.load([BLOCK_M, first])
            gate_rest = tl.dot(g, v.T, gate_rest, input_precision="ieee")
            up_rest = tl.dot(u, v.T, up_rest, input_precision="ieee")
    _store(result, gate * tl.sigmoid(gate) * up, column, 0, rows, outputs)
    if REST:
        value = gate_rest * tl.sigmoid(gate_rest) * up_rest
        _store(result, value, column, BLOCK_M, rows, outputs)


@jit
def _store(target, tile, column, first_row, rows, outputs):
    """A tile [outputs, rows] goes to target [M, N]."""
    columns = column + tl.arange(0, tile.shape[0])
    row = first_row + tl.arange(0, tile.shape[1])
    where = row[None, :] * outputs + columns[:, None]
    mask = (columns[:, None] < outputs) & (row[None, :] < rows)
    tl.store(target + where, tile.to(target.dtype.element_ty), mask)
