"""Recurrent layers with `exact`: the plain modules' numbers, and the same bits in any cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda import exact_recurrent
from headstart.backends.cuda.exact import ExactKernels, filled
from headstart.backends.cuda.exact_recurrent import (
    exact_prompt_recur,
    exact_repeat,
    exact_round_recur,
)
from headstart.backends.cuda.kernels.delta import Rings, empty_rings
from headstart.backends.cuda.recurrent import RecurrentBatch, settle
from headstart.models.delta_config import DeltaConfig
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates, SlotRecurrence, StateSpan, empty_states

pytestmark = pytest.mark.usefixtures("quick_kernels")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, ROWS = 32, 9
CONFIG = DeltaConfig(k_heads=1, v_heads=2, k_dim=8, v_dim=6, kernel=4)


def net(config: DeltaConfig = CONFIG) -> DeltaNet:
    made = DeltaNet(HIDDEN, config, 1e-6).to(DEVICE)
    for number, parameter in enumerate(made.parameters()):
        draw = torch.Generator().manual_seed(number)
        parameter.data = torch.randn(parameter.shape, generator=draw).to(DEVICE) * 0.4
    return made


def rows() -> Tensor:
    draw = torch.Generator().manual_seed(50)
    return torch.randn(2 * ROWS, HIDDEN, generator=draw).to(DEVICE)


def states() -> LayerStates:
    return empty_states(CONFIG, 6, torch.float32, DEVICE)


def read(
    kept: LayerStates, x: Tensor, spans: list[StateSpan], config: DeltaConfig = CONFIG
) -> Tensor:
    recur = exact_prompt_recur(ExactKernels(64), [kept], spans)
    return recur(net(config), 0, filled(x)).sum(0)[: len(x)]


# Of two texts all rows; a state is kept within the first, twice.
WHOLE = [
    StateSpan(0, ROWS, None, ((4, 2), (4, 3), (ROWS, 0))),
    StateSpan(ROWS, 2 * ROWS, None, ((ROWS, 1),)),
]  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_rows_of_prompts_are_those_of_the_plain_modules(gate: Literal["silu", "sigmoid"]) -> None:
    kept, wanted, x, config = states(), states(), rows(), replace(CONFIG, gate=gate)
    found = read(kept, x, WHOLE, config)
    plain = net(config)(x, None, SlotRecurrence(wanted, WHOLE))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept.memory, wanted.memory, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept.conv, wanted.conv, rtol=1e-4, atol=1e-5)
    assert kept.memory[2].any() and torch.equal(kept.memory[2], kept.memory[3])


@torch.inference_mode()
def test_short_texts_beside_a_long_one_take_no_memory_of_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one row and of fewer than a convolution looks back at, too; one goes on with a state."""
    places, x = list[int](), torch.cat([rows(), rows()])
    spans = [
        StateSpan(0, 1, None, ((1, 0),)), StateSpan(1, 25, None, ((24, 1),)),
        StateSpan(25, 27, 5, ((1, 4), (2, 5))), StateSpan(27, 36, None, ((9, 2),)),
    ]  # fmt: skip

    def made(buffers: int, length: int, *others: Any) -> Rings:
        places.append(buffers * length)
        return empty_rings(buffers, length, *others)

    monkeypatch.setattr(exact_recurrent, "empty_rings", made)
    kept, wanted = states(), states()
    for own in (kept, wanted):
        for tensor in (own.conv, own.memory):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    found = read(kept, x, spans)
    plain = net()(x, None, SlotRecurrence(wanted, spans))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept.memory, wanted.memory, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept.conv, wanted.conv, rtol=1e-4, atol=1e-5)
    assert places == [len(x) + len(spans) * (CONFIG.kernel - 1)]


@torch.inference_mode()
def test_chunks_and_rounds_give_the_same_bits() -> None:
    """The first text in two chunks, the second in a chunk and rounds, one with a rejected row."""
    kept, x = states(), rows()
    whole = read(kept, x, WHOLE)
    own, last = states(), slice(ROWS, 2 * ROWS)
    first = read(own, torch.cat([x[:4], x[last][:5]]), [
        StateSpan(0, 4, None, ((4, 0),)), StateSpan(4, 9, None, ((5, 1),)),
    ])  # fmt: skip
    assert torch.equal(first, torch.cat([whole[:4], whole[last][:5]]))
    assert torch.equal(own.memory[0], kept.memory[2]) and torch.equal(own.conv[0], kept.conv[2])
    second = read(own, x[4:ROWS], [StateSpan(0, 5, 0, ((5, 0),))])
    assert torch.equal(second, whole[4:ROWS]) and torch.equal(own.memory[0], kept.memory[0])

    batch = RecurrentBatch.create(CONFIG, 1, 2, 1, torch.float32, DEVICE)
    batch.admit(1, 1, 1, 5, [own])
    kernels, at = ExactKernels(64), 5
    for given, accepted in (((5, 0), 1), ((6, 7), 2), ((8,), 1)):
        place = torch.tensor([-1, at], dtype=torch.int32, device=DEVICE)
        new = torch.zeros(2, len(given), HIDDEN, device=DEVICE)
        new[1] = x[last][list(given)]
        recur = exact_round_recur(kernels, batch, [own], place, len(given))
        found = recur(net(), 0, filled(new.flatten(0, 1))).sum(0)[: 2 * len(given)]
        right = found[len(given) : len(given) + accepted]
        assert torch.equal(right, whole[last][at : at + accepted])
        batch.replays[1] = accepted
        at += accepted
    batch.replays[0] = 0
    settle([net()], batch, [own], [1, ROWS + 1], exact_repeat)
    assert torch.equal(own.memory[1], kept.memory[1]) and torch.equal(own.conv[1], kept.conv[1])
