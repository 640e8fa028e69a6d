"""Attention over windows, with sinks and values of another size, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda.kernels.attention import Packed, paged_attention
from headstart.backends.cuda.kernels.attention_cuts import Cut
from headstart.backends.cuda.kernels.gates import gate_heads
from headstart.backends.cuda.kernels.prompts import Tile, prompt_attention, tiles_of
from headstart.backends.cuda.kernels.rows import place_qkv
from headstart.models.rope import NO_ROTATION, RopeConfig, RotaryTable, rotate
from headstart.models.row_attention import attend_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, DIM, VALUE, PAGE = 4, 2, 16, 12, 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# Shorter than a step, longer than one, longer than every context.
WINDOWS = [5, 40, 200]


@pytest.mark.parametrize("cut", [Cut(pieces=4, step=16), Cut(tokens=16, step=16)])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("first_slot", "has_sinks"), [(0, True), (1, False)])
def test_rows_of_rounds_see_their_window(
    window: int, cut: Cut, first_slot: int, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request in the middle, one at its very beginning, no third."""
    monkeypatch.setattr("headstart.backends.cuda.kernels.attention._LEAST_OF_WINDOW", 16)
    rows, seen = 3, [57, 1, -1]
    q = random(3, rows, HEADS, DIM)
    k, v = random(80, KV_HEADS, DIM, seed=1), random(80, KV_HEADS, VALUE, seed=2)
    tables = torch.randperm(20, generator=torch.Generator().manual_seed(3)).int().to(DEVICE)
    sinks = random(HEADS, seed=4) if has_sinks else None
    found = paged_attention(
        q, k, v, tables.expand(3, 20).contiguous(), numbers(*seen), block_size=PAGE,
        max_context=64, cut=cut, first_slot=first_slot, window=window, sinks=sinks,
    )  # fmt: skip
    slots = (tables.long()[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()
    for request, first in enumerate(seen[:2]):
        context = slots[first_slot : first + rows]
        wanted = attend_rows(q[request], k[context], v[context], window, sinks)
        torch.testing.assert_close(found[request], wanted, rtol=1e-4, atol=1e-5)
    assert not found[2].any()


def test_rows_of_a_packed_pass_write_results_as_wide_as_values() -> None:
    k, v = random(64, KV_HEADS, DIM, seed=1), random(64, KV_HEADS, VALUE, seed=2)
    tables = torch.arange(16, dtype=torch.int32, device=DEVICE).expand(2, 16).contiguous()
    q, room = random(7, HEADS, DIM), torch.zeros(7, HEADS * DIM, device=DEVICE)
    packed = Packed(5, room, numbers(0, 5), numbers(5, 2))
    found = paged_attention(
        q, k, v, tables, numbers(30, 0), packed=packed, window=7, sinks=random(HEADS, seed=4),
        block_size=PAGE, max_context=40, cut=Cut(pieces=2, step=16),
    )  # fmt: skip
    for rows, first in ((range(5), 30), (range(5, 7), 0)):
        own, stop = q[rows.start : rows.stop], first + len(rows)
        wanted = attend_rows(own, k[:stop], v[:stop], 7, random(HEADS, seed=4))
        torch.testing.assert_close(found[rows.start : rows.stop], wanted, rtol=1e-4, atol=1e-5)
    assert found.data_ptr() == room.data_ptr()


@pytest.mark.parametrize("window", [*WINDOWS, None])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_rows_of_prompts_see_their_window(window: int | None, has_sinks: bool) -> None:
    num_rows, lengths = [5, 37, 90], [5, 70, 90]
    k, v = random(200, KV_HEADS, DIM, seed=1), random(200, KV_HEADS, VALUE, seed=2)
    q, sinks = random(sum(num_rows), HEADS, DIM), random(HEADS, seed=4) if has_sinks else None
    context = torch.randperm(200, generator=torch.Generator().manual_seed(3))[: sum(lengths)]
    context, tile = context.to(DEVICE, torch.int32), Tile(rows=16, tokens=32)
    edges, seen = [0, 5, 42, 132], [0, 5, 75, 165]
    tiles = torch.tensor(tiles_of(num_rows, tile), dtype=torch.int32, device=DEVICE)
    found = prompt_attention(
        q, k, v, context, tiles, numbers(*edges), numbers(*seen), tile, window=window, sinks=sinks
    )
    for request in range(3):
        own = context[seen[request] : seen[request + 1]].long()
        rows = slice(edges[request], edges[request + 1])
        wanted = attend_rows(q[rows], k[own], v[own], window, sinks)
        torch.testing.assert_close(found[rows], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rope", [RopeConfig("default", 1e4, 6), NO_ROTATION])
def test_values_may_be_smaller_than_keys_and_scaled(rope: RopeConfig) -> None:
    partial = random(2, 3, (HEADS + KV_HEADS) * DIM + KV_HEADS * VALUE)
    rotary = RotaryTable(rope, 8, torch.float32).to(DEVICE)
    positions, slots = torch.tensor([5, 1, 0], device=DEVICE), numbers(1, -1, 2)
    k, v = (torch.zeros(4, KV_HEADS, size, device=DEVICE) for size in (DIM, VALUE))
    q = place_qkv(
        partial, None, None, 1e-6, rotary.cos, rotary.sin, positions, slots, k, v, HEADS,
        v_scale=0.7,
    )  # fmt: skip
    sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * VALUE]
    parts = partial.sum(0).split(sizes, -1)
    wanted_q, wanted_k, wanted_v = (
        part.view(3, -1, size) for part, size in zip(parts, (DIM, DIM, VALUE), strict=True)
    )
    rotation = rotary.at(positions)
    torch.testing.assert_close(q, rotate(wanted_q, *rotation), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k[[1, 2]], rotate(wanted_k, *rotation)[[0, 2]])
    torch.testing.assert_close(v[[1, 2]], wanted_v[[0, 2]] * 0.7)
    assert not k[[0, 3]].any() and not v[[0, 3]].any()


def test_a_head_may_have_a_gate() -> None:
    rows, partial = random(3, HEADS, VALUE), random(2, 3, HEADS, seed=5)
    wanted = rows * partial.sum(0).sigmoid().unsqueeze(-1)
    torch.testing.assert_close(gate_heads(rows, partial), wanted)
