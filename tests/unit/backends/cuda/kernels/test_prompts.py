"""Attention of prompts against plain PyTorch; on the CPU interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headstart.backends.cuda.kernels.prompts import Tile, prompt_attention, tiles_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 200


def test_rows_see_their_context_wherever_it_lies() -> None:
    num_rows, lengths = [5, 37, 1, 20], [5, 70, 33, 20]  # the second and third go on
    draw = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, SLOTS, KV_HEADS, DIM, generator=draw).to(DEVICE).unbind()
    q = torch.randn(sum(num_rows), HEADS, DIM, generator=draw).to(DEVICE)
    context = torch.randperm(SLOTS, generator=draw)[: sum(lengths)].to(DEVICE, torch.int32)
    tile = Tile(rows=16, tokens=32, warps=4)

    def numbers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    row_edges, context_edges = (
        [sum(parts[:i]) for i in range(len(parts) + 1)] for parts in (num_rows, lengths)
    )
    tiles = torch.tensor(tiles_of(num_rows, tile), dtype=torch.int32, device=DEVICE)
    found = prompt_attention(
        q, k, v, context, tiles, numbers(row_edges), numbers(context_edges), tile
    )
    for request, (count, length) in enumerate(zip(num_rows, lengths, strict=True)):
        own = context[context_edges[request] : context_edges[request + 1]].long()
        for row in range(count):
            seen = own[: length - count + row + 1]
            keys, values = (x[seen].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            at = row_edges[request] + row
            shares = (torch.einsum("hd,shd->hs", q[at], keys) * DIM**-0.5).softmax(-1)
            wanted = torch.einsum("hs,shd->hd", shares, values)
            torch.testing.assert_close(found[at], wanted, rtol=1e-4, atol=1e-5)


def test_the_longest_walks_come_first() -> None:
    tiles = tiles_of([40, 10], Tile(rows=16))
    assert tiles == [(0, 32), (0, 16), (1, 0), (0, 0)]
