"""Every kernel against plain PyTorch; on the CPU through Triton's interpreter."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda.kernels import attention, attention_cuts, shared_prefix
from headstart.backends.cuda.kernels.attention import Packed, paged_attention
from headstart.backends.cuda.kernels.attention_cuts import Cut, fitted, usual_context
from headstart.backends.cuda.kernels.choice import choose_logits, choose_rows
from headstart.backends.cuda.kernels.gates import gate_rows
from headstart.backends.cuda.kernels.linear import Shape, gated_linear, partial_linear
from headstart.backends.cuda.kernels.rows import (
    add_norm,
    begin_norm,
    place_qkv,
    silu_product,
)
from headstart.backends.cuda.kernels.shared_prefix import shared_lengths
from headstart.models.rope import RopeConfig, RotaryTable, rotate
from headstart.sampling import noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


@pytest.mark.parametrize("rows", [1, 3, 16, 37])
@pytest.mark.parametrize("inputs", [256, 200], ids=["even", "ragged"])
@pytest.mark.parametrize("splits", [1, 3])
def test_partial_products_add_up_to_the_product(rows: int, inputs: int, splits: int) -> None:
    x, weight = random(rows, inputs), random(100, inputs)
    partial = partial_linear(x, weight, Shape(outputs=32, inputs=64, splits=splits))
    assert partial.shape == (splits, rows, 100)
    torch.testing.assert_close(partial.sum(0), x @ weight.T, rtol=1e-4, atol=1e-3)


def test_a_row_does_not_depend_on_how_many_rows_there_are() -> None:
    x, weight = random(9, 256), random(96, 256)
    whole = partial_linear(x, weight, Shape(outputs=32, inputs=64, splits=2))
    for rows in range(1, 9):
        part = partial_linear(x[:rows].contiguous(), weight, Shape(outputs=32, inputs=64, splits=2))
        assert torch.equal(part, whole[:, :rows])


@pytest.mark.parametrize("inputs", [128, 90], ids=["even", "ragged"])
def test_gated_product(inputs: int) -> None:
    x, weight = random(5, inputs), random(2 * 70, inputs)
    gate, up = (x @ weight.T).chunk(2, -1)
    found = gated_linear(x, weight, Shape(outputs=32, inputs=64))
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(silu_product(x @ weight.T), wanted, rtol=1e-4, atol=1e-3)


def test_residual_and_norm() -> None:
    stream, partial, gain = random(3, 96), random(2, 3, 96, seed=1), random(96)
    wanted = stream + partial.sum(0)
    normed = add_norm(stream, partial, gain, 1e-5)
    torch.testing.assert_close(stream, wanted)
    reference = torch.nn.functional.rms_norm(wanted, (96,), gain, 1e-5)
    torch.testing.assert_close(normed, reference, rtol=1e-5, atol=1e-5)
    begun, normed = begin_norm(partial, gain, 1e-5, torch.float32)
    torch.testing.assert_close(begun, partial.sum(0))
    reference = torch.nn.functional.rms_norm(begun, (96,), gain, 1e-5)
    torch.testing.assert_close(normed, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("has_norms", [False, True], ids=["no norms", "norms"])
@pytest.mark.parametrize(
    ("rotated", "is_interleaved"), [(16, False), (8, False), (16, True)],
    ids=["halves", "partial", "neighbours"],
)  # fmt: skip
def test_queries_keys_and_values_find_their_places(
    has_bias: bool, has_norms: bool, rotated: int, is_interleaved: bool
) -> None:
    heads, kv_heads, dim, rows = 4, 2, 16, 3
    partial = random(2, rows, (heads + 2 * kv_heads) * dim)
    bias = random((heads + 2 * kv_heads) * dim, seed=2) if has_bias else None
    norms = (random(dim, seed=3), random(dim, seed=4)) if has_norms else None
    rope = RopeConfig("default", 1e4, rotated, is_interleaved=is_interleaved)
    rotary = RotaryTable(rope, 32, torch.float32).to(DEVICE)
    positions = torch.tensor([5, 30, 0], device=DEVICE)
    slots = torch.tensor([7, -1, 2], dtype=torch.int32, device=DEVICE)
    k_cache, v_cache = random(2, 10, kv_heads, dim).unbind()
    k_before, v_before = k_cache.clone(), v_cache.clone()
    q = place_qkv(
        partial, bias, norms, 1e-6, rotary.cos, rotary.sin, positions, slots, k_cache, v_cache,
        heads, is_interleaved=is_interleaved,
    )  # fmt: skip
    full = partial.sum(0) + (0 if bias is None else bias)
    wanted_q, wanted_k, wanted_v = full.view(rows, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        wanted_q = torch.nn.functional.rms_norm(wanted_q, (dim,), norms[0], 1e-6)
        wanted_k = torch.nn.functional.rms_norm(wanted_k, (dim,), norms[1], 1e-6)
    rotation = rotary.at(positions)
    torch.testing.assert_close(q, rotate(wanted_q, *rotation), rtol=1e-4, atol=1e-5)
    k_before[[7, 2]] = rotate(wanted_k, *rotation)[[0, 2]]
    v_before[[7, 2]] = wanted_v[[0, 2]]
    torch.testing.assert_close(k_cache, k_before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(v_cache, v_before, rtol=1e-4, atol=1e-5)


def test_queries_may_have_gates() -> None:
    heads, kv_heads, dim, rows = 3, 1, 8, 2
    partial = random(2, rows, (2 * heads + 2 * kv_heads) * dim)
    rotary = RotaryTable(RopeConfig("default", 1e4, dim), 8, torch.float32).to(DEVICE)
    positions = torch.tensor([5, 1], device=DEVICE)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    k_cache, v_cache = torch.zeros(2, 4, kv_heads, dim, device=DEVICE).unbind()
    q = place_qkv(
        partial, None, None, 1e-6, rotary.cos, rotary.sin, positions, slots, k_cache, v_cache,
        heads, is_gated=True,
    )  # fmt: skip
    full = partial.sum(0).view(rows, -1, dim)
    rotation = rotary.at(positions)
    torch.testing.assert_close(q, rotate(full[:, 0:6:2], *rotation), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k_cache[1], rotate(full[:, 6:7], *rotation)[0])
    torch.testing.assert_close(v_cache[1], full[0, 7:])
    seen = random(rows, heads * dim, seed=3)
    wanted = seen * full[:, 1:6:2].flatten(1).sigmoid()
    torch.testing.assert_close(gate_rows(seen, partial, dim), wanted)


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize(
    "cut",
    [
        Cut(tokens=16, step=16),
        Cut(tokens=64, step=32),
        Cut(pieces=5, least=20, step=16),
        Cut(pieces=5, least=70, step=16),  # one piece, whichever it is
    ],
    ids=str,
)
@pytest.mark.parametrize("combining", [(1, 2), (16, 1)], ids=str)
def test_paged_attention(
    cut: Cut, first_slot: int, combining: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_COMBINING", ((100, combining),))  # in several steps
    monkeypatch.setattr(attention.torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    rows, heads, kv_heads, dim, page = 3, 4, 2, 16, 4
    seen = torch.tensor([1, 37, -1, 62], dtype=torch.int32, device=DEVICE)
    k_cache, v_cache = random(2, 40 * page, kv_heads, dim).unbind()
    tables = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:36].view(2, 18)
    tables = torch.cat([tables, tables.flip(0)]).to(DEVICE, torch.int32)
    q = random(4, rows, heads, dim)
    found = paged_attention(
        q, k_cache, v_cache, tables, seen, block_size=page, max_context=66, cut=cut,
        first_slot=first_slot,
    )  # fmt: skip
    for b, first in enumerate(seen.tolist()):
        for r in range(rows if first >= 0 else 0):
            logical = torch.arange(first_slot, first + r + 1, device=DEVICE)
            kv_slots = tables[b, logical // page].long() * page + logical % page
            keys = k_cache[kv_slots].repeat_interleave(heads // kv_heads, 1)
            values = v_cache[kv_slots].repeat_interleave(heads // kv_heads, 1)
            shares = (torch.einsum("hd,shd->hs", q[b, r], keys) * dim**-0.5).softmax(-1)
            wanted = torch.einsum("hs,shd->hd", shares, values)
            torch.testing.assert_close(found[b, r], wanted, rtol=1e-4, atol=1e-4)
    assert not found[2].any()


@pytest.mark.parametrize(("context", "pieces"), [(60, 1), (130, 3), (2000, 8)])
def test_no_more_pieces_than_contexts_could_have(context: int, pieces: int) -> None:
    grids: dict[str, list[Any]] = {"_attend": [], "combine": []}

    class Watched:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: grids[self.name].append(grid)

    q, cache = random(2, 1, 2, 16), random(64, 1, 16)
    tables = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    with ExitStack() as patched:
        for name in grids:
            patched.enter_context(patch.object(attention, name, Watched(name)))
        paged_attention(
            q, cache, cache, tables, tables[:, 0], block_size=4, max_context=context,
            cut=Cut(pieces=8, least=64, step=16),
        )  # fmt: skip
    assert grids["_attend"] == [(2, 1, pieces)]
    assert len(grids["combine"]) == int(pieces > 1), "one piece is the result"


def test_rows_that_do_not_fit_one_program_attend_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = torch.tensor([2, -1, 40], dtype=torch.int32, device=DEVICE)
    k_cache, v_cache = random(2, 64, 1, 16).unbind()
    tables = torch.arange(16, dtype=torch.int32, device=DEVICE).expand(3, 16).contiguous()
    q = random(3, 5, 4, 16)
    sizes = {"block_size": 4, "max_context": 46, "cut": Cut(tokens=16, step=16)}
    whole = paged_attention(q, k_cache, v_cache, tables, seen, **sizes)
    monkeypatch.setattr(attention_cuts, "_MOST_LINES", 2 * 4)  # two rows of four heads
    found = paged_attention(q, k_cache, v_cache, tables, seen, **sizes)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    assert not found[1].any() and found[2].any()


@pytest.mark.parametrize(
    ("seen", "levels", "pieces"),
    [([60, 60, 60], 1, 1), ([9, 9, 60], 1, 2), ([1, 1, 1], 1, 1), ([60, 60, 60], 3, 2)],
    ids=str,
)
def test_only_contexts_longer_than_usual_are_cut_further(
    seen: list[int], levels: int, pieces: int
) -> None:
    """By the tokens of a piece: a quarter more than the mean, and no fewer than `least`."""
    cut = Cut(pieces=4, least=16, levels=levels, step=16)
    places = torch.tensor([*seen, -1], dtype=torch.int32, device=DEVICE)
    usual = usual_context(places, cut)
    assert usual is not None
    assert usual.item() == max(16, sum(seen) // 3 * 5 // 4 // levels)
    each = -(-int(usual.item()) // 16) * 16
    assert -(-(max(seen) + 1) // each) == pieces
    k_cache, v_cache = random(2, 64, 1, 16).unbind()
    tables = torch.arange(16, dtype=torch.int32, device=DEVICE).expand(4, 16).contiguous()
    q, sizes = random(4, 1, 4, 16), {"block_size": 4, "max_context": 64}
    found = paged_attention(q, k_cache, v_cache, tables, places, cut=cut, usual=usual, **sizes)
    whole = Cut(pieces=1, step=16)
    wanted = paged_attention(q, k_cache, v_cache, tables, places, cut=whole, **sizes)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert usual_context(places, whole) is None


# Blocks of nine requests, four neighbours each: three that begin alike and no fourth; one of four
# that is another from its third block on; one alone.
_BEGINNINGS = [0, 0, 0, 0, 1, 1, 1, 2, 1]
_SEEN = [40, 37, 62, -1, 30, 50, 41, 33, 60]


@pytest.mark.parametrize(
    ("first_slot", "is_packed", "pieces"), [(0, False, 1), (1, False, 4), (0, True, 4)]
)
def test_what_neighbours_share_is_read_once(
    first_slot: int, is_packed: bool, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix, "LEAST", 8)
    rows, heads, kv_heads, dim, page = 3, 8, 2, 16, 4
    k_cache, v_cache = random(2, 400 * page, kv_heads, dim).unbind()
    own = torch.arange(100, 100 + 9 * 18, dtype=torch.int32).view(9, 18)
    tables = own.clone()
    for number, beginning in enumerate(_BEGINNINGS):
        tables[number, :8] = torch.arange(beginning * 8, beginning * 8 + 8)
        if beginning == 2:
            tables[number, :2] = tables[number - 1, :2]
    tables, seen = tables.to(DEVICE), torch.tensor(_SEEN, dtype=torch.int32, device=DEVICE)
    shared = shared_lengths(tables, seen, 4, block_size=page)
    assert shared.tolist() == [32, 32, 32, 0, 8, 8, 8, 8, 0]
    q, sizes = random(9, rows, heads, dim), {"block_size": page, "max_context": 66}
    wanted = paged_attention(
        q, k_cache, v_cache, tables, seen, cut=Cut(pieces=1, step=16), first_slot=first_slot,
        **sizes,
    )  # fmt: skip
    packed = Packed(rows, torch.zeros(9 * rows, heads, dim, device=DEVICE)) if is_packed else None
    tables[1, :8] = 399  # its neighbour's table is read for what they share
    found = paged_attention(
        q.flatten(0, 1) if is_packed else q, k_cache, v_cache, tables, seen, first_slot=first_slot,
        cut=Cut(pieces=pieces, least=16, step=16), shared=shared, packed=packed, **sizes,
    )  # fmt: skip
    torch.testing.assert_close(found.view_as(wanted), wanted, rtol=1e-5, atol=1e-5)
    assert found.any() and not found.view_as(wanted)[3].any()


@pytest.mark.parametrize("most_lines", [256, 2 * 4], ids=["whole", "in parts"])
@pytest.mark.parametrize("least", [16, 70])
def test_rows_of_a_packed_pass_attend_as_by_themselves(
    most_lines: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of five rows, no third; then groups of three rows, of two and of none."""
    monkeypatch.setattr(attention_cuts, "_MOST_LINES", most_lines)
    k_cache, v_cache = random(2, 64, 1, 16).unbind()
    tables = torch.arange(16, dtype=torch.int32, device=DEVICE).expand(3, 16).contiguous()
    sizes = {"block_size": 4, "max_context": 66, "cut": Cut(pieces=4, least=least, step=16)}
    q, result = random(17, 4, 16), torch.full((17, 4, 16), 7.0, device=DEVICE)

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    decoding = Packed(5, result)  # the third makes its rows zero, which groups have after that
    paged_attention(q, k_cache, v_cache, tables, numbers(2, 40, -1), packed=decoding, **sizes)
    groups = Packed(5, result, numbers(10, 13, 0), numbers(3, 2, 0))
    seen = numbers(31, 0, -1)
    found = paged_attention(q, k_cache, v_cache, tables, seen, packed=groups, **sizes)
    assert found.data_ptr() == result.data_ptr()
    for rows, first in ((range(5), 2), (range(5, 10), 40), (range(10, 13), 31), (range(13, 15), 0)):
        own = q[rows.start : rows.stop].unsqueeze(0).contiguous()
        wanted = paged_attention(own, k_cache, v_cache, tables[:1], numbers(first), **sizes)[0]
        found = result[rows.start : rows.stop]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert (result[15:] == 7).all(), "rows of no request stay as they are"


@pytest.mark.parametrize(
    ("lines", "dim", "number_bytes", "step", "warps"),
    [(16, 128, 2, 128, 4), (16, 256, 2, 64, 4), (64, 256, 2, 64, 8), (128, 128, 2, 128, 8),
     (256, 64, 2, 64, 8), (16, 64, 4, 32, 8)],
)  # fmt: skip
def test_wide_heads_and_many_lines_have_shorter_steps_or_more_warps(
    lines: int, dim: int, number_bytes: int, step: int, warps: int
) -> None:
    cut = Cut(pieces=64, least=128, step=128, warps=4, stages=1)
    assert fitted(cut, lines, dim, number_bytes) == replace(cut, step=step, warps=warps)


@pytest.mark.parametrize("is_reduced", [False, True], ids=["all tokens", "draft vocabulary"])
def test_the_fused_choice_is_the_samplers(is_reduced: bool) -> None:
    rows, inputs, tokens = 4, 64, 150
    x, weight = random(rows, inputs), random(tokens, inputs)
    ids = torch.arange(7, 7 + 3 * tokens, 3, device=DEVICE) if is_reduced else None
    seeds, positions = [11, -12, 1 << 62, 14], [3, 5, 8, 13]
    temperature = torch.tensor([0.0, 0.7, 1.0, 30.0], device=DEVICE)
    inv_temps = torch.where(temperature > 0, 1 / temperature, 0.0)
    where = torch.tensor(seeds, device=DEVICE), torch.tensor(positions, device=DEVICE)
    cut = Shape(outputs=64, inputs=32)
    found = choose_rows(x, weight, inv_temps, *where, ids, cut)
    original = torch.arange(tokens, device=DEVICE) if ids is None else ids
    logits = x @ weight.T
    sums = logits * inv_temps[:, None] + noise.gumbel(seeds, positions, original)
    sums[0] = logits[0]
    assert found.tolist() == original[sums.argmax(-1)].tolist()
    assert choose_logits(logits, inv_temps, *where, ids).tolist() == found.tolist()
    plain = choose_rows(x, weight, torch.zeros_like(inv_temps), *where, ids, cut)
    assert plain.tolist() != found.tolist()


def test_equal_logits_go_to_the_lowest_id() -> None:
    x, weight = torch.ones(2, 32, device=DEVICE), torch.ones(200, 32, device=DEVICE)
    inv_temps, zeros = (
        torch.zeros(2, device=DEVICE),
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
    )
    cut = Shape(outputs=64, inputs=32)
    assert choose_rows(x, weight, inv_temps, zeros, zeros, None, cut).tolist() == [0, 0]


def test_logits_that_are_no_numbers_choose_a_token_all_the_same() -> None:
    logits = torch.full((2, 90), torch.nan, device=DEVICE)
    inv_temps = torch.tensor([0.0, 1.0], device=DEVICE)
    where = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.arange(2, device=DEVICE)
    assert choose_logits(logits, inv_temps, *where).tolist() == [0, 0]
