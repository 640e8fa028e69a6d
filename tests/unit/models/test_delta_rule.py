"""The gated delta rule: row by row, in chunks, and as transformers computes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headstart.models.delta_config import DeltaConfig
from headstart.models.delta_rule import CHUNK_ROWS, DeltaRows, recur, scan
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import SlotRecurrence, StateSpan, empty_states

SIZES = DeltaConfig(k_heads=2, v_heads=4, k_dim=16, v_dim=8, kernel=4)
HIDDEN = 24


def random_rows(count: int, dtype: torch.dtype, seed: int = 0) -> tuple[DeltaRows, Tensor]:
    """Rows as a net makes them (keys of length one, decay below 1), and a memory to begin with."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    heads = SIZES.v_heads
    q, k = (torch.nn.functional.normalize(noise(count, heads, SIZES.k_dim), dim=-1) for _ in "qk")
    parts = (
        q * SIZES.k_dim**-0.5, k, noise(count, heads, SIZES.v_dim),
        -noise(count, heads).exp(), noise(count, heads).sigmoid(),
    )  # fmt: skip
    memory = noise(heads, SIZES.k_dim, SIZES.v_dim)
    return DeltaRows(*(part.to(dtype) for part in parts)), memory.to(dtype)


def one_by_one(rows: DeltaRows, memory: Tensor) -> tuple[Tensor, Tensor]:
    results, memory = [], memory[None]
    for row in range(rows.num_rows):
        result, memory = recur(rows[row : row + 1], memory)
        results.append(result)
    return torch.cat(results), memory[0]


@pytest.mark.parametrize("count", [1, 7, CHUNK_ROWS, CHUNK_ROWS + 1, 2 * CHUNK_ROWS + 30])
def test_chunks_and_single_rows_give_the_same(count: int) -> None:
    rows, memory = random_rows(count, torch.float64)
    expected, expected_memory = one_by_one(rows, memory)
    results, after = scan(rows, memory)
    torch.testing.assert_close(results, expected, atol=1e-12, rtol=1e-11)
    torch.testing.assert_close(after, expected_memory, atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize("form", [scan, one_by_one])
def test_the_rule_is_the_one_of_transformers(form: object) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as published

    rows, memory = random_rows(100, torch.float32)
    results, after = form(rows, memory)
    for rule in (
        published.torch_chunk_gated_delta_rule, published.torch_recurrent_gated_delta_rule,
    ):  # fmt: skip
        expected, expected_memory = rule(
            rows.q[None] * SIZES.k_dim**0.5, rows.k[None], rows.v[None], g=rows.log_decay[None],
            beta=rows.strength[None], initial_state=memory[None], output_final_state=True,
        )  # fmt: skip
        torch.testing.assert_close(results, expected[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after, expected_memory[0], atol=1e-5, rtol=1e-4)


def random_net(dtype: torch.dtype) -> DeltaNet:
    net = DeltaNet(HIDDEN, SIZES, 1e-6).to(dtype)
    draw = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=draw).to(dtype)
    return net


def random_states(count: int, seed: int = 2) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).double()


@torch.inference_mode()
@pytest.mark.parametrize("is_alone", [False, True], ids=["batched", "one by one"])
def test_states_kept_after_any_row_equal_a_recomputation_from_scratch(is_alone: bool) -> None:
    """Two texts side by side, cut into chunks and drafts; every kept state is checked."""
    net = random_net(torch.float64)
    texts = [random_states(70), random_states(41, seed=3)]
    whole = []
    for text in texts:
        states = empty_states(SIZES, 80, torch.float64, torch.device("cpu"))
        keeps = tuple((row + 1, row) for row in range(len(text)))
        context = SlotRecurrence(states, [StateSpan(0, len(text), None, keeps)], one_by_one=True)
        whole.append((net(text, None, context), states))

    states = empty_states(SIZES, 12, torch.float64, torch.device("cpu"))
    done, slots = [0, 0], [0, 1]
    for sizes, kept in (
        ((30, 5), "last"), ((3, 4), "all"), ((33, 0), "two"), ((1, 30), "last"), ((3, 2), "all"),
    ):  # fmt: skip
        spans, inputs = [], []
        for which, size in enumerate(sizes):
            if not size:
                continue
            begin = sum(map(len, inputs))
            wanted = {"last": [size], "all": range(1, size + 1), "two": [size // 2, size]}[kept]
            # the last one in place, the others in slots of their own
            places = [2 + 5 * which + i for i in range(len(wanted) - 1)] + [slots[which]]
            source = slots[which] if done[which] else None
            keeps = tuple(zip(wanted, places, strict=True))
            spans.append(StateSpan(begin, begin + size, source, keeps))
            inputs.append(texts[which][done[which] : done[which] + size])
        results = net(torch.cat(inputs), None, SlotRecurrence(states, spans, one_by_one=is_alone))
        for which, span in zip([i for i, s in enumerate(sizes) if s], spans, strict=True):
            expected, all_states = whole[which]
            rows = slice(done[which], done[which] + span.stop - span.start)
            torch.testing.assert_close(
                results[span.start : span.stop], expected[rows], atol=1e-10, rtol=1e-10
            )
            for count, slot in span.keeps:
                at = done[which] + count - 1
                for ours, theirs in ((states.conv, all_states.conv),
                                     (states.memory, all_states.memory)):  # fmt: skip
                    torch.testing.assert_close(ours[slot], theirs[at], atol=1e-10, rtol=1e-10)
            done[which] += span.stop - span.start
    assert done == [70, 41]


@torch.inference_mode()
def test_a_state_of_another_row_would_show() -> None:
    net = random_net(torch.float64)
    text = random_states(12)
    states = empty_states(SIZES, 12, torch.float64, torch.device("cpu"))
    keeps = tuple((row + 1, row) for row in range(8))
    expected = net(text, None, SlotRecurrence(states, [StateSpan(0, 12, None, ((12, 11),))]))[8:]
    net(text[:8], None, SlotRecurrence(states, [StateSpan(0, 8, None, keeps)]))
    for slot, is_right in ((7, True), (6, False)):
        rest = net(text[8:], None, SlotRecurrence(states, [StateSpan(0, 4, slot, ((4, 10),))]))
        assert torch.allclose(rest, expected, atol=1e-10) is is_right
