"""Prompts of gated delta nets through the kernels, against the plain module row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from support.interpreted_bf16 import repair_bf16, round_bf16
from support.long_runs import unless_long
from support.quick_interpreter import quicken, quicken_delta_prompts

from headstart.backends.cuda import recurrent_prompts
from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.kernels.delta_chunks import ChunkTile
from headstart.backends.cuda.kernels.delta_prompts import WalkTile
from headstart.backends.cuda.recurrent_prompts import (
    PromptTiles,
    plain_recur,
    prompt_recur,
    why_plain,
)
from headstart.backends.rows import on_device
from headstart.models.delta_config import DeltaConfig
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates, SlotRecurrence, StateSpan, empty_states

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = DeltaConfig(k_heads=1, v_heads=2, k_dim=16, v_dim=12, kernel=4)
OTHER = DeltaConfig(k_heads=2, v_heads=2, k_dim=12, v_dim=40, kernel=3, gate="sigmoid")
HIDDEN, SLOTS = 24, 10
# Fresh, going on with snapshots (two slots keep one of them), few rows, fresh with one.
SPANS = [
    StateSpan(0, 70, None, ((70, 0),)),
    StateSpan(70, 190, 1, ((64, 5), (112, 6), (120, 1), (120, 7))),
    StateSpan(190, 193, 2, ((1, 8), (2, 9), (3, 2))),
    StateSpan(193, 223, None, ((16, 3), (30, 4))),
]
# At the borders of chunks of 64 rows, and shorter than what a convolution looks back at.
BORDERS = [
    StateSpan(0, 1, None, ((1, 0),)), StateSpan(1, 64, 1, ((62, 2), (63, 1))),
    StateSpan(64, 128, None, ((1, 3), (64, 4))), StateSpan(128, 193, 5, ((64, 6), (65, 5))),
    StateSpan(193, 194, 7, ((1, 7),)), StateSpan(194, 196, 8, ((1, 9), (2, 8))),
]  # fmt: skip
FEW_SPANS = [StateSpan(0, 70, None, ((64, 0), (70, 1))), StateSpan(70, 90, 2, ((20, 2),))]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    quicken_delta_prompts(monkeypatch)


def make_net(config: DeltaConfig = CONFIG) -> DeltaNet:
    """One head forgets at once, the other hardly ever."""
    torch.manual_seed(0)
    net = DeltaNet(HIDDEN, config, 1e-6)
    for value in net.parameters():
        value.data.normal_(0, 0.4)
    net.a_log.data = torch.tensor([3.0, -6.0])
    return net.to(DEVICE)


def drawn_states(config: DeltaConfig, dtype: torch.dtype = torch.float32) -> LayerStates:
    states = empty_states(config, SLOTS, dtype, DEVICE)
    for tensor in (states.conv, states.memory):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return states


def drawn_rows(count: int, repeated: float = 0.0) -> Tensor:
    """Some of them the same one again: equal keys are what makes the triangular system large."""
    draw = torch.Generator().manual_seed(2)
    rows = torch.randn(count, HIDDEN, generator=draw)
    rows[torch.rand(count, generator=draw) < repeated] = rows[0].clone()
    return rows.to(DEVICE)


def plainly(net: DeltaNet, x: Tensor, spans: list[StateSpan]) -> tuple[Tensor, LayerStates]:
    """Row by row in fp64."""
    drawn = drawn_states(net.config)
    states = LayerStates(drawn.conv.double(), drawn.memory.double())
    own = DeltaNet(HIDDEN, net.config, net.eps).to(DEVICE)
    own.load_state_dict(net.state_dict())
    own.double()
    return own(x.double(), None, SlotRecurrence(states, spans, one_by_one=True)), states


@torch.inference_mode()
def assert_same(net: DeltaNet, x: Tensor, spans: list[StateSpan]) -> LayerStates:
    wanted, expected = plainly(net, x, spans)
    states = drawn_states(net.config)
    found = prompt_recur(Kernels(), [states], spans)(net, 0, x).sum(0)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(states.memory.double(), expected.memory, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(states.conv.double(), expected.conv, rtol=1e-4, atol=1e-5)
    return states


@pytest.mark.parametrize("config", [CONFIG, OTHER], ids=["grouped", "other sizes"])
def test_several_requests_and_all_states_that_are_kept(
    config: DeltaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net(config)
    if config is OTHER:  # heads are split as on a GPU, and so are rows of the convolution
        tiles = PromptTiles(ChunkTile(conv_rows=32), WalkTile(values=16))
        monkeypatch.setattr(recurrent_prompts, "tiles_for", lambda *_: tiles)
    states = assert_same(net, drawn_rows(223), SPANS)
    assert torch.equal(states.memory[1], states.memory[7])
    before = drawn_states(config).memory
    changed = [slot for slot in range(SLOTS) if not torch.equal(states.memory[slot], before[slot])]
    assert changed == list(range(SLOTS)), "the control: all of them were written"


def test_texts_that_end_at_borders_of_chunks_beside_texts_of_a_row() -> None:
    assert_same(make_net(), drawn_rows(196), BORDERS)


def test_a_state_of_another_row_would_show() -> None:
    wrong = [SPANS[0], replace(SPANS[1], keeps=((63, 5), *SPANS[1].keeps[1:])), *SPANS[2:]]
    x, net, states = drawn_rows(223), make_net(), drawn_states(CONFIG)
    expected = plainly(net, x, SPANS)[1]
    with torch.inference_mode():
        prompt_recur(Kernels(), [states], wrong)(net, 0, x)
    gap = (states.memory.double() - expected.memory).abs().amax((1, 2, 3))
    assert gap[5] > 0.01 and gap.sum() - gap[5] < 1e-4


@st.composite
def cut_texts(draw: st.DrawFn) -> list[StateSpan]:
    """Up to three requests of any length, cut anywhere; slots are used once."""
    slots, start, spans = iter(range(SLOTS)), 0, []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 100))
        begins = draw(st.booleans())
        own = next(slots)
        ends = sorted(draw(st.sets(st.integers(1, count), max_size=2)))
        keeps = [(end, next(slots)) for end in ends]
        span = StateSpan(start, start + count, None if begins else own, (*keeps, (count, own)))
        spans.append(span)
        start += count
    return spans


@settings(
    max_examples=unless_long(3, 25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(spans=cut_texts(), repeated=st.sampled_from([0.0, 0.5, 1.0]))
def test_whatever_is_cut_where(spans: list[StateSpan], repeated: float) -> None:
    assert_same(make_net(), drawn_rows(spans[-1].stop, repeated), spans)


@pytest.mark.parametrize("values", unless_long([16], [16, 32]))
def test_in_bf16_as_close_as_the_plain_module(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    repair_bf16(monkeypatch)
    round_bf16(monkeypatch)
    tiles = PromptTiles(ChunkTile(), WalkTile(values=values))
    monkeypatch.setattr(recurrent_prompts, "tiles_for", lambda *_: tiles)
    config = replace(CONFIG, v_dim=32)
    net, x = make_net(config).bfloat16(), drawn_rows(90, 0.3).bfloat16()
    gaps = []
    with torch.inference_mode():
        wanted, expected = plainly(net, x, FEW_SPANS)
        for is_plain in (True, False):
            states = drawn_states(config, torch.bfloat16)
            if is_plain:
                found = net(x, None, SlotRecurrence(states, FEW_SPANS))
            else:
                found = prompt_recur(Kernels(), [states], FEW_SPANS)(net, 0, x).sum(0)
            pairs = ((found, wanted), (states.memory, expected.memory))
            gaps.append([float((a - b).norm() / b.norm()) for a, b in pairs])
    assert all(own < 1.5 * plain + 2e-3 for plain, own in zip(*gaps, strict=True)), gaps


@torch.inference_mode()
def test_numbers_go_to_the_device_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that goes to the device waits for it: one copy a pass, none per row or layer."""
    net, x = make_net(), drawn_rows(90)
    layers = [drawn_states(CONFIG) for _ in range(2)]
    copies = list[list[int]]()

    def counted(values: list[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        copies.append(values)
        return on_device(values, device, dtype)

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("a number went to the device")

    monkeypatch.setattr(recurrent_prompts, "on_device", counted)
    recur = prompt_recur(Kernels(), layers, FEW_SPANS)
    monkeypatch.setattr(torch, "tensor", refuse)
    for layer in range(2):
        recur(net, layer, x)
    assert len(copies) == 1 and torch.equal(layers[0].memory, layers[1].memory)


@pytest.mark.parametrize(
    ("dtype", "k_dim", "v_dim", "reason"),
    [
        (torch.bfloat16, 128, 128, None),
        (torch.bfloat16, 32, 80, None),
        (torch.float32, 128, 128, "numbers are float32, kernels are made for bfloat16"),
        (torch.bfloat16, 16, 12, "heads have sizes of 16 and 12"),
        (torch.bfloat16, 128, 256, "heads have sizes of 128 and 256"),
    ],
)
def test_what_was_not_shown_on_a_gpu_is_read_plainly(
    dtype: torch.dtype, k_dim: int, v_dim: int, reason: str | None
) -> None:
    config = replace(CONFIG, k_dim=k_dim, v_dim=v_dim)
    assert why_plain(config, dtype, torch.device("cuda")) == reason
    assert why_plain(config, dtype, torch.device("cpu")) is None, "interpreted kernels take all"


@torch.inference_mode()
def test_the_plain_way_gives_the_same() -> None:
    net, x = make_net(), drawn_rows(90)
    wanted, expected = plainly(net, x, FEW_SPANS)
    states = drawn_states(CONFIG)
    found = plain_recur([states], FEW_SPANS)(net, 0, x).sum(0)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(states.memory.double(), expected.memory, rtol=1e-3, atol=2e-5)


def test_one_request_has_narrow_programs_where_they_fill_a_gpu() -> None:
    """Of Qwen3-Next and Qwen3.5-27B, by what was faster on an H200."""
    sizes = {"k_heads": 16, "k_dim": 128, "v_dim": 128}
    small, large = (replace(CONFIG, v_heads=heads, **sizes) for heads in (32, 48))
    found = [recurrent_prompts.many_requests(config) for config in (small, large)]
    assert found == [2, 1]
