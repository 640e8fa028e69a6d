"""Attention over keys and values in 8-bit floats: the same as over the numbers that they mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.interpreted_bf16 import repair_fp8

from headstart.backends.cuda.kernels import attention, attention_cuts
from headstart.backends.cuda.kernels.attention import Packed, paged_attention
from headstart.backends.cuda.kernels.attention_cuts import Cut, fitted
from headstart.backends.cuda.kernels.prompts import Tile, prompt_attention, tiles_of
from headstart.backends.cuda.kernels.rows import place_qkv
from headstart.backends.cuda.libraries import Library
from headstart.models.attention import LayerCache, Span, empty_fp8_cache
from headstart.models.kv_fp8 import to_kv_fp8
from headstart.models.rope import RopeConfig, RotaryTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_HEADS, HEADS, DIM, PAGE = 2, 4, 24, 4  # sizes that fill no tile


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def filled(slots: int) -> tuple[LayerCache, Tensor, Tensor]:
    """A cache whose tokens differ in size, and the numbers that it means."""
    shape = (KV_HEADS, DIM)
    cache = empty_fp8_cache((shape, shape), slots, torch.float32, torch.device(DEVICE))
    assert cache.sizes is not None
    gain = torch.logspace(-1, 1, slots, device=DEVICE)[torch.randperm(slots)][:, None, None]
    for number, part in enumerate((cache.k, cache.v)):
        words, sizes = to_kv_fp8(random(slots, *shape, seed=number) * gain ** (1 - number))
        part.copy_(words)
        cache.sizes[..., number] = sizes
    return cache, *cache.read(slice(None))


@pytest.mark.parametrize(
    ("cut", "first_slot"), [(Cut(tokens=32, step=16), 1), (Cut(pieces=5, least=70, step=16), 0)],
    ids=["pieces", "whole"],
)  # fmt: skip
def test_rows_of_rounds(cut: Cut, first_slot: int) -> None:
    cache, k, v = filled(40 * PAGE)
    seen = numbers(1, 37, -1, 62)
    tables = torch.stack([torch.randperm(40)[:18] for _ in range(4)]).to(DEVICE, torch.int32)
    q = random(4, 3, HEADS, DIM, seed=3)
    sizes: dict[str, Any] = {"block_size": PAGE, "max_context": 66, "first_slot": first_slot}
    wanted = paged_attention(q, k, v, tables, seen, cut=cut, **sizes)
    found = paged_attention(q, cache.k, cache.v, tables, seen, cut=cut, sizes=cache.sizes, **sizes)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not found[2].any()
    assert cache.sizes is not None
    other = paged_attention(
        q, cache.k, cache.v, tables, seen, cut=cut, sizes=cache.sizes.flip(-1).contiguous(), **sizes
    )
    assert (other - wanted).abs().max() > 0.1, "the control: sizes of keys and values exchanged"


@pytest.mark.parametrize("most_lines", [256, 2 * 4], ids=["whole", "in parts"])
def test_rows_of_a_packed_pass(most_lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cuts, "_MOST_LINES", most_lines)
    monkeypatch.setattr(attention, "_WIDE", 16)  # a second loop, without masks
    cache, k, v = filled(64)
    tables = torch.arange(16, dtype=torch.int32, device=DEVICE).expand(3, 16).contiguous()
    sizes: dict[str, Any] = {
        "block_size": PAGE, "max_context": 66, "cut": Cut(pieces=4, least=16, step=16),
    }  # fmt: skip
    q, found = random(5, HEADS, DIM), torch.full((5, HEADS, DIM), 7.0, device=DEVICE)
    groups = Packed(3, found, numbers(0, 3, 0), numbers(3, 1, 0))
    seen = numbers(31, 9, -1)
    paged_attention(
        q, cache.k, cache.v, tables, seen, packed=groups, sizes=cache.sizes, **sizes
    )  # fmt: skip
    wanted = torch.full_like(found, 7.0)
    paged_attention(q, k, v, tables, seen, packed=replace(groups, result=wanted), **sizes)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (found[4] == 7).all()


def test_rows_of_prompts() -> None:
    cache, k, v = filled(90)
    num_rows, lengths = [5, 20], [37, 20]
    q, tile = random(25, HEADS, DIM, seed=2), Tile(rows=16, tokens=16)
    context = torch.randperm(90)[:57].to(DEVICE, torch.int32)
    tiles = torch.tensor(tiles_of(num_rows, tile), dtype=torch.int32, device=DEVICE)
    given = context, tiles, numbers(0, 5, 25), numbers(0, 37, 57), tile
    found = prompt_attention(q, cache.k, cache.v, *given, sizes=cache.sizes)
    wanted = prompt_attention(q, k, v, *given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    seen = Span(0, 5, context[32:37].long(), context[:37].long())
    asked: list[tuple[Tensor, ...]] = []
    library = Library("watched", lambda *own: asked.append(own) or own[0], 1, 1)
    assert lengths[0] == seen.num_seen and len(library.run([seen], q, cache)) == 1
    assert torch.equal(asked[0][1], k[seen.context]) and torch.equal(asked[0][2], v[seen.context])


@pytest.mark.parametrize(
    ("rotated", "is_interleaved"), [(24, False), (8, False), (24, True)],
    ids=["halves", "partial", "neighbours"],
)  # fmt: skip
def test_keys_and_values_are_written_as_the_plain_modules_round_them(
    rotated: int, is_interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, whatever other rows there are; a row without a slot writes nothing."""
    if DEVICE == "cpu":
        repair_fp8(monkeypatch)
    rope = RopeConfig("default", 1e4, rotated, is_interleaved=is_interleaved)
    rotary = RotaryTable(rope, 32, torch.float32).to(DEVICE)
    partial = random(2, 3, (HEADS + 2 * KV_HEADS) * DIM, seed=5)
    partial[:, 2] *= 50
    places = torch.tensor([5, 30, 1], device=DEVICE), numbers(7, -1, 2)
    given = partial, None, None, 1e-6, rotary.cos, rotary.sin, *places
    k, v = torch.zeros(2, 10, KV_HEADS, DIM, device=DEVICE).unbind()
    wanted_q = place_qkv(*given, k, v, HEADS, is_interleaved=is_interleaved)
    shape = (KV_HEADS, DIM)
    cache = empty_fp8_cache((shape, shape), 10, torch.float32, torch.device(DEVICE))
    assert cache.sizes is not None
    q = place_qkv(
        *given, cache.k, cache.v, HEADS, is_interleaved=is_interleaved, sizes=cache.sizes,
        dtype=torch.float32,
    )  # fmt: skip
    assert torch.equal(q, wanted_q)
    for number, (part, plain) in enumerate(((cache.k, k), (cache.v, v))):
        words, sizes = to_kv_fp8(plain[[7, 2]])
        assert torch.equal(part[[7, 2]], words)
        assert torch.equal(cache.sizes[[7, 2], :, number], sizes)
    assert not cache.k[[0, 1, 3, 9]].any() and not cache.sizes[[0, 1, 3, 9]].any()


def test_fewer_registers_are_asked_for_nothing() -> None:
    """Words go through registers, so the limit that was found for bf16 does not hold."""
    cut = Cut(pieces=8, least=768, step=128, registers=96)
    assert fitted(cut, 16, 128, 2).registers == 96
    found = fitted(cut, 16, 128, 2, is_fp8=True)
    assert (found.registers, found.step) == (None, 64)
