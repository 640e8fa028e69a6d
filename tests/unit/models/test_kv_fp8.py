"""Keys and values in 8-bit floats: what is held of a token depends on that token alone."""

from __future__ import annotations

import pytest
import torch

from headstart.models.attention import LayerCache, Span, empty_fp8_cache
from headstart.models.kv_fp8 import LEAST_SIZE, from_kv_fp8, rounded_kv, to_kv_fp8


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [1e-20, 0.01, 1.0, 300.0, 1e20])
def test_numbers_of_any_size_keep_four_bits(size: float) -> None:
    """Each within a sixteenth of itself, or of what e4m3 holds of the largest."""
    values = random(5, 2, 64) * size
    found = rounded_kv(values)
    near = values.abs().amax(-1, keepdim=True) * 2.0**-16
    assert ((found - values).abs() <= (values.abs() / 16).clamp(min=near)).all()
    assert not torch.equal(found, values)
    assert torch.equal(rounded_kv(found), found), "what is rounded already stays"


def test_a_token_is_held_alike_in_every_company() -> None:
    values = random(6, 2, 16)
    values[3] *= 1000
    words, sizes = to_kv_fp8(values)
    for token in range(6):
        own, size = to_kv_fp8(values[token : token + 1])
        assert torch.equal(own[0], words[token]) and torch.equal(size[0], sizes[token])
    assert sizes[3].min() > sizes[[0, 1, 2, 4, 5]].max(), "the control: sizes differ"


def test_bf16_holds_every_number_exactly() -> None:
    words, sizes = to_kv_fp8(random(8, 1, 128) * 40)
    wide, narrow = (from_kv_fp8(words, sizes, kind) for kind in (torch.float32, torch.bfloat16))
    assert torch.equal(wide, narrow.float())


def test_exponents_are_of_the_smallest_power_that_is_not_exceeded() -> None:
    values = torch.tensor([[1.0, 0.1], [1.01, 0], [-2.0, 1], [0, 0]])
    words, sizes = to_kv_fp8(values)
    assert sizes.tolist() == [127, 128, 128, LEAST_SIZE]
    assert from_kv_fp8(words, sizes, torch.float32)[:, 0].tolist() == [1.0, 1.0, -2.0, 0.0]
    assert words.shape == (4, 1) and words.dtype == torch.int16


def test_caches_round_or_hold_words() -> None:
    k, v = random(2, 3, 2, 16).unbind()
    rounding = LayerCache(torch.zeros(8, 2, 16), torch.zeros(8, 2, 16), rounds=True)
    rounding.keep(slice(4, 7), k, v)
    assert torch.equal(rounding.k[4:7], rounded_kv(k)) and torch.equal(
        rounding.v[4:7], rounded_kv(v)
    )
    held = empty_fp8_cache(((2, 16), (2, 16)), 8, torch.float32, torch.device("cpu"))
    assert held.sizes is not None
    for part, values, number in ((held.k, k, 0), (held.v, v, 1)):
        words, sizes = to_kv_fp8(values)
        part[4:7], held.sizes[4:7, :, number] = words, sizes
    span = Span(0, 3, slice(4, 7), torch.tensor([6, 4]))
    found_k, found_v = held.read(span.context)
    assert torch.equal(found_k, rounded_kv(k)[[2, 0]]) and torch.equal(
        found_v, rounded_kv(v)[[2, 0]]
    )
    taken = held.k.nbytes + held.v.nbytes + held.sizes.nbytes
    assert taken == 8 * 2 * (2 * 16 + 2 * 2)
