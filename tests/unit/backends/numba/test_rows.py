"""What the compiled kernels do between products, against plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from headstart.models.feed_forward import gated
from headstart.models.moe_config import Limit
from headstart.models.rope import RopeConfig, RotaryTable, rotate

pytest.importorskip("numba")

from headstart.backends.numba.context import attend
from headstart.backends.numba.layers import runs
from headstart.backends.numba.rows import limited_swiglu, norm, rotate_pairs, swiglu
from headstart.backends.numba.rows import rotate as rotate_row

DIM, KV_HEADS, GROUP, SLOTS = 80, 2, 3, 320
NO_SINKS = np.full(4 * GROUP, -np.inf, np.float32)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def test_norm() -> None:
    x, weight, out = random(100) * 3, random(100), np.empty(100, np.float32)
    norm(x, weight, 1e-5, out)
    expected = rms_norm(torch.from_numpy(x), (100,), torch.from_numpy(weight), 1e-5)
    torch.testing.assert_close(torch.from_numpy(out), expected)


def test_gate_of_small_and_of_huge_values() -> None:
    both, out = random(200) * 30, np.empty(100, np.float32)
    both[:4] = (-1e30, -100, 100, 1e30)
    swiglu(both, out)
    values = torch.from_numpy(both)
    expected = silu(values[:100]) * values[100:]
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-6, atol=1e-5)


def test_rotation_of_a_part_of_a_head() -> None:
    table = RotaryTable(RopeConfig("default", 1e4, 32), 9, torch.float32)
    x, out = random(48), np.empty(48, np.float32)
    rotate_row(x, table.cos[7].numpy(), table.sin[7].numpy(), np.float32(2), out)
    cos, sin, _ = table.at(torch.tensor([7]))
    expected = rotate(torch.from_numpy(x)[None, None], cos, sin)[0, 0] * 2
    torch.testing.assert_close(torch.from_numpy(out), expected)


def seen(kv_slots: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Attention over tokens whose keys and values lie at `kv_slots` of a cache."""
    k, v = random(SLOTS, KV_HEADS, DIM) * 2, random(KV_HEADS, SLOTS, DIM).transpose(1, 0, 2)
    keys = np.zeros((SLOTS // 16, KV_HEADS, DIM, 16), np.float32)
    values = np.zeros((SLOTS, KV_HEADS, DIM), np.float32)
    for token, place in zip(where, kv_slots, strict=True):
        keys[place // 16, :, :, place % 16] = k[token]
        values[place] = v[token]
    queries, out = random(GROUP, DIM), np.empty((GROUP, DIM), np.float32)
    counts = np.full(GROUP, len(kv_slots))
    attend(queries, keys, values, 1, kv_slots, runs(kv_slots), counts, NO_SINKS, out)
    q, k1, v1 = (
        torch.from_numpy(np.ascontiguousarray(p)) for p in (queries, k[where, 1], v[where, 1])
    )
    expected = scaled_dot_product_attention(q[None], k1[None], v1[None], scale=1.0)[0]
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-4, atol=1e-5)
    return out


@pytest.mark.parametrize("count", [1, 15, 16, 17, 64, 65, 200, 257])
def test_attention_is_right_and_places_do_not_matter(count: int) -> None:
    tokens = np.arange(count)
    in_order = seen(np.arange(count), tokens)
    shifted = seen(np.arange(count) + 5, tokens)
    mixed = seen(np.random.default_rng(0).permutation(SLOTS)[:count], tokens)
    blocks = (np.arange(SLOTS).reshape(-1, 4)[::-1]).reshape(-1)[:count].copy()
    assert np.array_equal(in_order, shifted)
    assert np.array_equal(in_order, mixed)
    assert np.array_equal(in_order, seen(blocks, tokens))


@pytest.mark.parametrize("count", [1, 3, 16, 63, 64, 66, 130])
def test_queries_together_get_the_bits_they_get_alone(count: int) -> None:
    """Of rows that follow one another each sees one place more; heads of a row see the same."""
    keys, values = random(SLOTS // 16, KV_HEADS, DIM, 16), random(SLOTS, KV_HEADS, DIM)
    queries, kv_slots = random(4 * GROUP, DIM), np.random.default_rng(1).permutation(SLOTS)
    for seen in (np.arange(SLOTS), kv_slots):
        counts = np.repeat(np.arange(count, count + 4), GROUP)
        together = np.empty_like(queries)
        attend(queries, keys, values, 0, seen, runs(seen), counts, NO_SINKS, together)
        for number, own in enumerate(counts):
            part, alone = slice(number, number + 1), np.empty((1, DIM), np.float32)
            visible = seen[:own].copy()
            attend(
                queries[part], keys, values, 0, visible, runs(visible), counts[part], NO_SINKS,
                alone,
            )  # fmt: skip
            assert np.array_equal(alone[0], together[number])


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    keys, values = random(SLOTS // 16, KV_HEADS, DIM, 16), random(SLOTS, KV_HEADS, DIM)
    queries, slots = random(GROUP, DIM), np.arange(70)
    sinks, counts = np.array([-3, 4, 30], np.float32), np.full(GROUP, 70)
    out = np.empty((GROUP, DIM), np.float32)
    attend(queries, keys, values, 1, slots, runs(slots), counts, sinks, out)
    k = keys[:, 1].transpose(0, 2, 1).reshape(SLOTS, DIM)[:70]
    scores = torch.from_numpy(np.concatenate([queries @ k.T, sinks[:, None]], axis=1))
    expected = scores.softmax(1)[:, :-1] @ torch.from_numpy(values[:70, 1])
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-4, atol=1e-5)


def test_rotation_of_pairs_that_are_neighbours() -> None:
    table = RotaryTable(RopeConfig("default", 1e4, 32, is_interleaved=True), 9, torch.float32)
    x, out = random(48), np.empty(48, np.float32)
    rotate_pairs(x, table.cos[7].numpy(), table.sin[7].numpy(), np.float32(2), out)
    expected = rotate(torch.from_numpy(x)[None, None], *table.at(torch.tensor([7])))[0, 0] * 2
    torch.testing.assert_close(torch.from_numpy(out), expected)


@pytest.mark.parametrize("is_before", [False, True])
def test_gates_that_are_cut_off(is_before: bool) -> None:
    both, out = random(200) * 30, np.empty(100, np.float32)
    limited_swiglu(both, np.float32(2.5), is_before, out)
    gate, up = torch.from_numpy(both).chunk(2)
    expected = gated(gate, up, Limit(2.5, is_before))
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-5, atol=1e-5)


def test_runs() -> None:
    assert runs(np.array([4, 5, 9, 3, 4, 5])).tolist() == [2, 1, 1, 3, 2, 1]
