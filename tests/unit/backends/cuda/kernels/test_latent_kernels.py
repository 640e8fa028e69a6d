"""The kernels of latent attention against plain PyTorch; on the CPU interpreted."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

pytest.importorskip("triton")

from headstart.backends.cuda.kernels import latent
from headstart.backends.cuda.kernels.attention_cuts import Cut
from headstart.backends.cuda.kernels.latent import cut_for, latent_attention, tile_lines
from headstart.backends.cuda.kernels.latent_heads import lift_queries, lower_latents
from headstart.backends.cuda.kernels.latent_prompts import prompt_latents
from headstart.backends.cuda.kernels.latent_rows import Turn, keep_latents, turn_queries
from headstart.backends.cuda.kernels.prompts import Tile, tiles_of
from headstart.models.rope import RopeConfig, RotaryTable, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 4


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize(
    ("cut", "rows", "sizes"),
    [
        (Cut(pieces=3, least=20, step=16), 1, (3, 20, 6)),
        (Cut(pieces=3, least=1, step=16, lines=16), 4, (6, 16, 16)),  # two tiles of lines
        (Cut(pieces=1, step=32), 5, (3, 24, 4)),
        (Cut(pieces=4, least=70, step=16), 2, (2, 16, 6)),  # one piece, whichever it is
    ],
    ids=str,
)
def test_rows_gather_the_latents_that_they_see(
    cut: Cut, rows: int, sizes: tuple[int, int, int], first_slot: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(latent.torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    heads, rank, rope = sizes
    seen = torch.tensor([1, 37, -1, 60], dtype=torch.int32, device=DEVICE)
    tables = torch.randperm(39, generator=torch.Generator().manual_seed(1))[:36].view(2, 18) + 1
    tables = torch.cat([tables, tables.flip(0)]).to(DEVICE, torch.int32)
    entries = torch.full((40 * PAGE, rank + rope), torch.nan, device=DEVICE)  # not written yet
    for table, first in zip(tables, seen.tolist(), strict=True):
        own = torch.arange(first + rows if first >= 0 else 0, device=DEVICE)
        kv_slots = table[own // PAGE].long() * PAGE + own % PAGE
        entries[kv_slots] = random(40 * PAGE, rank + rope)[kv_slots]
    lifted, turned = random(4, rows, heads, rank), random(4, rows, heads, rope)
    found = latent_attention(
        lifted, turned, entries, tables, seen, scale=0.3, block_size=PAGE, max_context=66, cut=cut,
        first_slot=first_slot,
    )  # fmt: skip
    for b, first in enumerate(seen.tolist()):
        for r in range(rows if first >= 0 else 0):
            logical = torch.arange(first_slot, first + r + 1, device=DEVICE)
            kept = entries[tables[b, logical // PAGE].long() * PAGE + logical % PAGE]
            query = torch.cat([lifted[b, r], turned[b, r]], -1)
            wanted = (query @ kept.T * 0.3).softmax(-1) @ kept[:, :rank]
            torch.testing.assert_close(found[b, r], wanted, rtol=1e-4, atol=1e-4)
    assert not found[2].any()


@pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("q_rank", [24, None], ids=["latent queries", "queries"])
def test_latents_are_normed_keys_turned_and_both_kept(
    q_rank: int | None, is_interleaved: bool
) -> None:
    heads, dim, rank, rope, rows = 3, 14, 20, 6, 3
    begin = q_rank or heads * dim
    partial = random(2, rows, begin + rank + rope)
    q_norm, kv_norm = None if q_rank is None else random(q_rank), random(rank, seed=1)
    config = RopeConfig("default", 1e4, rope, is_interleaved=is_interleaved)
    rotary = RotaryTable(config, 32, torch.float32).to(DEVICE)
    positions = torch.tensor([5, 30, 0], device=DEVICE)
    turn = Turn(rotary.cos, rotary.sin, is_interleaved, positions)
    slots = torch.tensor([7, -1, 2], dtype=torch.int32, device=DEVICE)
    entries = random(10, rank + rope)
    wanted = entries.clone()
    q_latent = keep_latents(partial, q_norm, kv_norm, 1e-6, turn, slots, entries)
    whole, rotation = partial.sum(0), rotary.at(positions)
    kept = rms_norm(whole[:, begin : begin + rank], (rank,), kv_norm, 1e-6)
    key = rotate(whole[:, None, begin + rank :], *rotation)[:, 0]
    wanted[[7, 2]] = torch.cat([kept, key], -1)[[0, 2]]
    torch.testing.assert_close(entries, wanted, rtol=1e-4, atol=1e-5)
    if q_norm is not None:
        reference = rms_norm(whole[:, :begin], (begin,), q_norm, 1e-6)
        assert q_latent is not None
        torch.testing.assert_close(q_latent, reference, rtol=1e-4, atol=1e-5)
        return
    assert q_latent is None
    q = turn_queries(partial, heads, dim, turn, torch.float32)
    plain = whole[:, :begin].view(rows, heads, dim)
    turned = rotate(plain[..., dim - rope :], *rotation)
    reference = torch.cat([plain[..., : dim - rope], turned], -1)
    torch.testing.assert_close(q, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("rows", "nope", "v", "rank"), [(1, 12, 8, 40), (37, 150, 70, 150)])
def test_every_head_has_its_own_products(
    rows: int, nope: int, v: int, rank: int, is_interleaved: bool
) -> None:
    heads, rope = 3, 6
    ups, partial = random(heads, nope + v, rank), random(2, rows, heads * (nope + rope) + 5)
    config = RopeConfig("default", 1e4, rope, is_interleaved=is_interleaved)
    rotary = RotaryTable(config, 64, torch.float32).to(DEVICE)
    positions = torch.arange(rows, device=DEVICE) + 9
    turn = Turn(rotary.cos, rotary.sin, is_interleaved, positions)
    found, turned = lift_queries(partial, ups, nope, turn)
    q = partial.sum(0)[:, : heads * (nope + rope)].view(rows, heads, -1)
    lifted = torch.einsum("mhn,hnc->mhc", q[..., :nope], ups[:, :nope]).contiguous()
    torch.testing.assert_close(found, lifted, rtol=1e-4, atol=1e-3)
    wanted = rotate(q[..., nope:], *rotary.at(positions))
    torch.testing.assert_close(turned, wanted, rtol=1e-4, atol=1e-5)
    lowered = torch.einsum("mhc,hvc->mhv", lifted, ups[:, nope:])
    torch.testing.assert_close(lower_latents(lifted, ups, nope), lowered, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("each", [3, 2], ids=["all heads", "some heads"])
def test_prompts_attend_over_unfolded_latents(each: int) -> None:
    """In several steps, with and without a mask; the second and third request go on."""
    heads, nope, rope, v, rank, scale = 3, 10, 6, 12, 8, 0.4
    num_rows, lengths = [5, 37, 1], [5, 70, 33]
    q, entries = random(sum(num_rows), heads, nope + rope), random(sum(lengths), rank + rope)
    unfolded = random(sum(lengths), heads, nope + v)
    tile = Tile(rows=16, tokens=16)

    def edges(counts: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE)

    tiles = torch.tensor(tiles_of(num_rows, tile), dtype=torch.int32, device=DEVICE)
    found = torch.full((len(q), heads, v), torch.nan, device=DEVICE)
    for first in range(0, heads, each):
        some = unfolded[:, first : first + each].contiguous()
        prompt_latents(
            q, some, entries, tiles, edges(num_rows), edges(lengths), found, scale=scale,
            first_head=first, tile=tile,
        )  # fmt: skip
    keys = torch.cat(
        [unfolded[..., :nope], entries[:, None, rank:].expand(-1, heads, -1)], -1
    ).split(lengths)
    values, queries = unfolded[..., nope:].split(lengths), q.split(num_rows)
    wanted = [_causal(*parts, scale=scale) for parts in zip(queries, keys, values, strict=True)]
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-4, atol=1e-4)


def _causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    scores = torch.einsum("mhd,nhd->hmn", q, k) * scale
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hmn,nhv->mhv", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def test_few_requests_are_cut_into_more_pieces() -> None:
    """With 128 heads one row is two tiles of lines."""
    assert [tile_lines(lines, 2) for lines in (3, 20, 512)] == [16, 32, 64]
    assert tile_lines(512, number_bytes=4) == 16
    pieces = [cut_for(requests, 128, 2).pieces for requests in (1, 4, 16, 80)]
    assert pieces == [66, 16, 4, 1]
