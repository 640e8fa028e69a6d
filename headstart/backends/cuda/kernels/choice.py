"""The LM head and the choice of a token in one pass: logits are never written to memory.

For requests without truncation, penalties or masks the choice is the arg-max of logit /
temperature plus Gumbel noise, or of the logit alone; `sampling.py` has the others. Each program
keeps the best of its outputs; a second kernel takes the best of those, the lowest id on ties. The
noise is that of `sampling/noise.py`, bit for bit.

M rows, N outputs (tokens, or rows of a draft vocabulary), K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape, product_tile, tile_rows
from headstart.backends.cuda.kernels.noise import gumbel_of, noise_bits, row_keys

_LOGITS_TILE = 4096
_TILES_PER_STEP = 4096


def choose_rows(
    x: Tensor, weight: Tensor, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
    token_ids: Tensor | None = None, shape: Shape | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K], weight [N, K] -> chosen token ids [M] int64.

    inv_temps [M] fp32 are 1 / temperature, 0 for the plain arg-max; seeds and positions [M] int64
    make the noise; token_ids [N]: original ids of a draft vocabulary (ascending).
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous()
    shape = shape or Shape(outputs=64, inputs=128, stages=3)
    tiles = triton.cdiv(outputs, shape.outputs)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    where = torch.empty(rows, tiles, dtype=torch.int32, device=x.device)
    ids = token_ids if token_ids is not None else where
    tile = tile_rows(rows)
    _best_of_tile[(tiles, triton.cdiv(rows, tile))](
        x, weight, inv_temps, seeds, positions, ids, best, where, rows, outputs, inputs,
        tiles, BLOCK_M=tile, BLOCK_N=shape.outputs, BLOCK_K=shape.inputs,
        IS_EVEN=inputs % shape.inputs == 0, HAS_IDS=token_ids is not None,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return best_of_rows(best, where)


def choose_logits(
    logits: Tensor,
    inv_temps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor | None = None,
) -> Tensor:
    """The same from logits [M, N] that a library computed, for more rows than a tile has."""
    rows, outputs = logits.shape
    tiles = triton.cdiv(outputs, _LOGITS_TILE)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    where = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    _best_of_logits[(tiles, rows)](
        logits, inv_temps, seeds, positions, token_ids if token_ids is not None else where, best,
        where, outputs, tiles, BLOCK_N=_LOGITS_TILE, HAS_IDS=token_ids is not None,
        num_warps=8,
    )  # fmt: skip
    return best_of_rows(best, where)


def best_of_rows(best: Tensor, where: Tensor) -> Tensor:
    """Token ids [M] from each tile's best value and token [M, tiles]."""
    rows, tiles = best.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=best.device)
    _best_of_row[(rows,)](
        best, where, chosen, tiles, BLOCK=min(_TILES_PER_STEP, triton.next_power_of_2(tiles)),
        num_warps=8,
    )  # fmt: skip
    return chosen


@jit(do_not_specialize=["rows"])
def _best_of_tile(x, weight, inv_temps, seeds, positions, ids, best, where, rows, outputs,
                  inputs, tiles, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr, HAS_IDS: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    logits = product_tile(
        x, weight, row, rows, columns, outputs, inputs, 0, inputs, BLOCK_M, BLOCK_N, BLOCK_K,
        IS_EVEN,
    )  # fmt: skip
    best_of_values(
        logits, columns, row, inv_temps, seeds, positions, ids, best, where, rows, outputs, tiles,
        tile, HAS_IDS,
    )  # fmt: skip


@jit
def best_of_values(logits, columns, row, inv_temps, seeds, positions, ids, best, where, rows,
                   outputs, tiles, tile, HAS_IDS: tl.constexpr):  # fmt: skip
    """Keep the best of a tile's outputs `columns` for the rows `row`: logits [outputs, rows]."""
    is_row = row < rows
    tokens = columns
    if HAS_IDS:
        tokens = tl.load(ids + columns, columns < outputs, 0).to(tl.int32)
    inv_temp = tl.load(inv_temps + row, is_row, 0.0)
    value = logits
    if tl.max(inv_temp, 0) > 0:
        keys = row_keys(tl.load(seeds + row, is_row, 0), tl.load(positions + row, is_row, 0))
        noise = gumbel_of(noise_bits(tokens[:, None], keys[0][None, :], keys[1][None, :]))
        value = tl.where(inv_temp[None, :] > 0, logits * inv_temp[None, :] + noise, logits)
    value = tl.where(columns[:, None] < outputs, value, float("-inf"))
    top = tl.max(value, 0)
    chosen = tl.min(tl.where(value == top[None, :], tokens[:, None], 2147483647), 0)
    tl.store(best + row * tiles + tile, top, is_row)
    tl.store(where + row * tiles + tile, chosen, is_row)


@jit
def _best_of_logits(logits, inv_temps, seeds, positions, ids, best, where, outputs, tiles,
                    BLOCK_N: tl.constexpr, HAS_IDS: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    row = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < outputs
    value = tl.load(logits + row.to(tl.int64) * outputs + columns, is_column, float("-inf"))
    value = value.to(tl.float32)
    tokens = columns
    if HAS_IDS:
        tokens = tl.load(ids + columns, is_column, 0).to(tl.int32)
    value = with_noise(value, tokens, row, inv_temps, seeds, positions)
    keep_best(tl.where(is_column, value, float("-inf")), tokens, best, where, row * tiles + tile)


@jit
def with_noise(value, tokens, row, inv_temps, seeds, positions):
    """Logits of one row, over its temperature and with its noise where it has one."""
    inv_temp = tl.load(inv_temps + row)
    if inv_temp > 0:
        first, second = row_keys(tl.load(seeds + row), tl.load(positions + row))
        value = value * inv_temp + gumbel_of(noise_bits(tokens, first, second))
    return value


@jit
def keep_best(value, tokens, best, where, at):
    """Write the best of a tile's values, and its token, the lowest on ties, to place `at`."""
    top = tl.max(value, 0)
    tl.store(best + at, top)
    tl.store(where + at, tl.min(tl.where(value == top, tokens, 2147483647), 0))


@jit
def _best_of_row(best, where, chosen, tiles, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    token = tl.full((BLOCK,), 2147483647, dtype=tl.int32)
    for start in range(0, tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(best + row * tiles + at, at < tiles, float("-inf"))
        ids = tl.load(where + row * tiles + at, at < tiles, 2147483647)
        # Tiles come in the order of their ids: the first of equal values has the lowest.
        token = tl.where(value > top, ids, token)
        top = tl.maximum(value, top)
    most = tl.max(top, 0)
    lowest = tl.min(tl.where(top == most, token, 2147483647), 0)
    # Nothing is the best of logits that are no numbers; some token must be chosen all the same.
    tl.store(chosen + row, tl.where(lowest == 2147483647, 0, lowest).to(tl.int64))
