"""Latent attention of a few new rows per request, over a paged cache of latents and rotated keys.

Queries were brought into the space of latents, so all heads share what is kept: an entry is read
once by a program and is key and value at the same time. A request's rows times its heads are
lines; a program has a tile of them and a piece of the context, cut as in `attention.py`.

B requests, R rows of each, H heads, C numbers of a latent, P of a rotated key, E = C + P of an
entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.attention_cuts import Cut
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.pieces import combine
from headstart.backends.cuda.kernels.softmax import gathered, piece

# Of a program, by the bytes of a number: twice as many sums would not fit into its registers.
MOST_LINES = {2: 64, 4: 16}
_PROCESSORS = 132


def latent_attention(
    lifted: Tensor, turned: Tensor, entries: Tensor, tables: Tensor, seen: Tensor, *, scale: float,
    block_size: int, max_context: int, cut: Cut, first_slot: int = 0,
) -> Tensor:  # fmt: skip
    """lifted [B, R, H, C], turned [B, R, H, P], entries [slots, E] -> gathered [B, R, H, C].

    Both parts of a query are compared with an entry, its latent is what is gathered. tables, seen,
    max_context and first_slot are those of `paged_attention`.
    """
    batch, rows, heads, rank = lifted.shape
    rope = turned.shape[3]
    lines = rows * heads
    tile = cut.lines or tile_lines(lines, lifted.element_size())
    tiles = triton.cdiv(lines, tile)
    block_r, block_p = (max(16, triton.next_power_of_2(size)) for size in (rank, rope))
    cuts = min(cut.pieces or max_context, triton.cdiv(max_context, cut.tokens or cut.least))
    kept = (batch if cuts > 1 else 0, cuts, tiles * tile)
    partial = torch.empty(*kept, rank, dtype=torch.float32, device=lifted.device)
    sums = torch.empty(kept, dtype=torch.float32, device=lifted.device)
    result = torch.empty_like(lifted)
    _attend[(tiles, batch, cuts)](
        lifted, turned, entries, tables, seen, partial, sums, result, tables.stride(0), scale,
        first_slot,
        ROWS=rows, HEADS=heads, RANK=rank, ROPE=rope, BLOCK_R=block_r,
        BLOCK_P=block_p, TILE=tile, PAGE=block_size, LEAST=cut.least, CUT=cut.tokens,
        STEP=cut.step, IS_WHOLE=cuts == 1, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if cuts == 1:
        return result
    combine[(batch, 1, lines)](
        partial, sums, seen, None, None, None, None, None, None, result, cuts,
        ROWS=rows, HEADS=heads, KV_HEADS=1, GROUP=heads, DIM=rank, BLOCK_D=block_r,
        TILE=tiles * tile, LEAST=cut.least, CUT=cut.tokens, STEP=cut.step, LINES=1,
        BLOCK_C=min(8, triton.next_power_of_2(cuts)), LEFT_ALONE=-1,
        IS_PACKED=False, num_warps=4,
    )  # fmt: skip
    return result


def tile_lines(lines: int, number_bytes: int) -> int:
    """Lines of a program."""
    padded: int = triton.next_power_of_2(lines)
    return min(MOST_LINES[number_bytes], max(16, padded))


def cut_for(requests: int, lines: int, number_bytes: int) -> Cut:
    """By rule: pieces that give every processor of a GPU a program, which has it for itself.

    Steps, warps and stages are the fastest of benchmarks/gpu_latent.py on an H200 with
    DeepSeek-V3's sizes, but for one request with one row. Those of fp32 are by registers and
    shared memory, not by time.
    """
    tile = tile_lines(lines, number_bytes)
    pieces = max(1, _PROCESSORS // (requests * triton.cdiv(lines, tile)))
    if number_bytes > 2:
        return Cut(pieces=pieces, least=64, step=16, warps=8, stages=1, lines=tile)
    return Cut(pieces=pieces, least=64, step=64, warps=8, stages=2, lines=tile)


@jit(do_not_specialize=["first_slot", "table_stride"])
def _attend(lifted, turned, entries, tables, seen, partial, sums, result, table_stride, scale,
            first_slot, ROWS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
            ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
            TILE: tl.constexpr, PAGE: tl.constexpr, LEAST: tl.constexpr, CUT: tl.constexpr,
            STEP: tl.constexpr, IS_WHOLE: tl.constexpr):  # fmt: skip
    request = tl.program_id(1)
    part = tl.program_id(2)
    first = tl.load(seen + request)
    length = tl.where(first < 0, 0, first + ROWS)  # slots that the last row sees
    each = piece(length, tl.num_programs(2), None, LEAST, CUT, STEP)
    start = part * each
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)  # row by row, of each its heads
    is_line = line < ROWS * HEADS
    row = line // HEADS
    own = request.to(tl.int64) * ROWS * HEADS  # the request's first line
    at = tl.arange(0, BLOCK_R)
    turned_at = tl.arange(0, BLOCK_P)
    is_dim = at < RANK
    is_turned = turned_at < ROPE
    is_target = is_line[:, None] & is_dim[None, :]
    # Where pieces are not put together, a place without a request walks over nothing: zeros.
    if start < tl.maximum(length, IS_WHOLE):
        line_at = line[:, None] * RANK + at[None, :]
        query = tl.load(lifted + own * RANK + line_at, is_target, 0.0)
        source = turned + own * ROPE + line[:, None] * ROPE + turned_at[None, :]
        query_turned = tl.load(source, is_line[:, None] & is_turned[None, :], 0.0)
        best = tl.full((TILE,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((TILE,), dtype=tl.float32)
        value = tl.zeros((TILE, BLOCK_R), dtype=tl.float32)
        stop = tl.minimum(start + each, length)
        for place_in_cut in range(start, stop, STEP):
            slot = place_in_cut + tl.arange(0, STEP)
            is_slot = slot < stop
            # Beyond the piece its last entry is read again, and masked below.
            read = tl.minimum(slot, stop - 1)
            block = tl.load(tables + request * table_stride + read // PAGE)
            entry = entries + (block.to(tl.int64) * PAGE + read % PAGE)[:, None] * (RANK + ROPE)
            latents = tl.load(entry + at[None, :], is_dim[None, :], 0.0)
            keys = tl.load(entry + RANK + turned_at[None, :], is_turned[None, :], 0.0)
            scores = tl.dot(query, tl.trans(latents), input_precision="ieee")
            scores = tl.dot(query_turned, tl.trans(keys), scores, input_precision="ieee") * scale
            is_seen = (slot[None, :] <= first + row[:, None]) & (slot[None, :] >= first_slot)
            scores = tl.where(is_seen & is_slot[None, :], scores, float("-inf"))
            best, total, value = gathered(scores, latents, best, total, value)
        is_known = total > 0
        whole = tl.where(is_known, total, 1.0)
        value = value / whole[:, None]
        if IS_WHOLE:  # both ways out in one program would need more registers than there are
            target = result + own * RANK + line_at
            tl.store(target, value.to(result.dtype.element_ty), is_target)
        else:
            base = (request.to(tl.int64) * tl.num_programs(2) + part) * tl.num_programs(0) * TILE
            tl.store(sums + base + line, tl.where(is_known, best + tl.log(whole), float("-inf")))
            tl.store(partial + base * RANK + line_at, value, is_dim[None, :])
