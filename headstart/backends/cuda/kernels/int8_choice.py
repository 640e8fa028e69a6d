"""The LM head and the choice of a draft for some dozens of rows, from int8 on both sides.

`int8.py` writes x as two integers, which costs nothing while reading weights takes the time. With
more rows multiplying does, so here x is its nearest 8-bit integers alone. That rounds x, too: a
few more drafts are wrong, and a round is still quicker. Tiles are fetched as in `streamed.py`.

M rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headstart.backends.cuda.kernels.choice import best_of_rows, best_of_values
from headstart.backends.cuda.kernels.int8 import MAX_CHOICES, choose_int8, integers
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.streamed import has_copy_engine

# Rows of the tile and of a second one.
_TILES = ((64, 0), (64, 16), (128, 0))
MAX_ROWS = sum(_TILES[-1])
_COPIED = 16  # numbers of 8 bits: what the copy engine fetches at least
_SHAPE = Shape(outputs=64, inputs=128, warps=4, stages=4)


def chooser_for(x: Tensor) -> Callable[..., Tensor] | None:
    """`choose_int8`, `choose_streamed`, or None where the weights as they are would be quicker."""
    if x.shape[0] <= MAX_CHOICES:
        return choose_int8
    return choose_streamed if takes(x) else None


def takes(x: Tensor) -> bool:
    """Whether tiles can be streamed for these rows, on this device."""
    rows, inputs = x.shape
    return rows <= MAX_ROWS and inputs % _COPIED == 0 and has_copy_engine(x.device)


def choose_streamed(
    x: Tensor, weight: Tensor, scales: Tensor, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
    token_ids: Tensor | None = None, shape: Shape = _SHAPE,
) -> Tensor:  # fmt: skip
    """`choice.choose_rows` with weight [N, K] int8 and scales [N] fp32; K is a multiple of 16."""
    rows, outputs = x.shape[0], weight.shape[0]
    tiles = triton.cdiv(outputs, shape.outputs)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    where = torch.empty(rows, tiles, dtype=torch.int32, device=x.device)
    ids = token_ids if token_ids is not None else where
    _launch(
        x, weight, scales, shape, inv_temps, seeds, positions, ids, best, where,
        HAS_IDS=token_ids is not None, KEEPS_ALL=False,
    )  # fmt: skip
    return best_of_rows(best, where)


def logits_streamed(x: Tensor, weight: Tensor, scales: Tensor, shape: Shape = _SHAPE) -> Tensor:
    """The same product as logits [M, N] fp32, for a choice that needs them all."""
    result = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    none = (scales,) * 4
    _launch(x, weight, scales, shape, *none, result, scales, HAS_IDS=False, KEEPS_ALL=True)
    return result


def _launch(
    x: Tensor, weight: Tensor, scales: Tensor, shape: Shape, *noise_and_results: Tensor,
    **kind: bool,
) -> None:  # fmt: skip
    rows, inputs = x.shape
    outputs = weight.shape[0]
    whole, _, sizes = integers(x)
    tile, rest = next(tiles for tiles in _TILES if rows <= sum(tiles))
    tiles = triton.cdiv(outputs, shape.outputs)
    _best_of_tile[(tiles,)](
        TensorDescriptor.from_tensor(whole, [tile, shape.inputs]),
        TensorDescriptor.from_tensor(whole, [rest or tile, shape.inputs]), sizes,
        TensorDescriptor.from_tensor(weight, [shape.outputs, shape.inputs]), scales,
        *noise_and_results, rows, outputs, inputs, tiles, BLOCK_M=tile, REST=rest,
        BLOCK_N=shape.outputs, BLOCK_K=shape.inputs, **kind, num_warps=shape.warps,
        num_stages=shape.stages,
    )  # fmt: skip


@jit(do_not_specialize=["rows"])
def _best_of_tile(whole, whole_rest, sizes, weight, scales, inv_temps, seeds, positions, ids, best,
                  where, rows, outputs, inputs, tiles, BLOCK_M: tl.constexpr, REST: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_IDS: tl.constexpr,
                  KEEPS_ALL: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    column = tile * BLOCK_N
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    if REST:
        sums_rest = tl.zeros((BLOCK_N, REST), dtype=tl.int32)
    for first in range(0, inputs, BLOCK_K):
        w = weight.load([column, first])
        sums = tl.dot(w, whole.load([0, first]).T, sums, out_dtype=tl.int32)
        if REST:
            v = whole_rest.load([BLOCK_M, first])
            sums_rest = tl.dot(w, v.T, sums_rest, out_dtype=tl.int32)
    columns = column + tl.arange(0, BLOCK_N)
    gain = tl.load(scales + columns, columns < outputs, 0.0)[:, None]
    row = tl.arange(0, BLOCK_M)
    logits = sums.to(tl.float32) * gain * tl.load(sizes + row, row < rows, 0.0)[None, :]
    _keep(
        logits, columns, row, inv_temps, seeds, positions, ids, best, where, rows, outputs, tiles,
        tile, HAS_IDS, KEEPS_ALL,
    )  # fmt: skip
    if REST:
        row = BLOCK_M + tl.arange(0, REST)
        size = tl.load(sizes + row, row < rows, 0.0)[None, :]
        _keep(
            sums_rest.to(tl.float32) * gain * size, columns, row, inv_temps, seeds, positions, ids,
            best, where, rows, outputs, tiles, tile, HAS_IDS, KEEPS_ALL,
        )  # fmt: skip


@jit
def _keep(logits, columns, row, inv_temps, seeds, positions, ids, best, where, rows, outputs,
          tiles, tile, HAS_IDS: tl.constexpr, KEEPS_ALL: tl.constexpr):  # fmt: skip
    """All logits [outputs, rows] of a tile, or the best of each row."""
    if KEEPS_ALL:
        at = best + row[None, :].to(tl.int64) * outputs + columns[:, None]
        tl.store(at, logits, (columns[:, None] < outputs) & (row[None, :] < rows))
    else:
        best_of_values(
            logits, columns, row, inv_temps, seeds, positions, ids, best, where, rows, outputs,
            tiles, tile, HAS_IDS,
        )  # fmt: skip
