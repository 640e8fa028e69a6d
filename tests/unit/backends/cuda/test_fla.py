"""Prompts of recurrent layers by flash-linear-attention; a stand-in for it on the CPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda import fla
from headstart.backends.cuda.fla import FlaScan, choose_scan, try_library
from headstart.backends.cuda.recurrent import ragged_recur
from headstart.models.delta_config import DeltaConfig
from headstart.models.delta_rule import DeltaRows, recur, scan_texts
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates, StateSpan, empty_states

CPU = torch.device("cpu")
CONFIG = DeltaConfig(k_heads=1, v_heads=2, k_dim=16, v_dim=12, kernel=4)
HIDDEN = 32


class StandIn:
    """The contract of fla-core 0.6's `chunk_gated_delta_rule`, computed by `recur` row by row.

    Names, layouts and defaults are those of its documentation: one batch [1, T, H, ...] of texts
    that begin and end at `cu_seqlens`, states [texts, H, K, V], decays as logarithms.
    """

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
        scale: float | None = None, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert q.shape == k.shape and q.shape[:3] == v.shape[:3] and q.shape[0] == 1
        assert g.shape == beta.shape == v.shape[:3] and g.dtype == torch.float32
        assert output_final_state and not use_qk_l2norm_in_kernel
        assert cu_seqlens is not None and initial_state is not None
        assert initial_state.shape == (len(cu_seqlens) - 1, *k.shape[2:], v.shape[3])
        assert initial_state.dtype == torch.float32
        lengths = cu_seqlens.diff().tolist()
        self.asked.append(lengths)
        chunks = [[text, i] for text, rows in enumerate(lengths) for i in range(-(-rows // 64))]
        assert chunk_indices is None or chunk_indices.tolist() == chunks
        factor = k.shape[-1] ** -0.5 if scale is None else scale
        rows = DeltaRows(q[0].float() * factor, k[0].float(), v[0].float(), g[0], beta[0])
        results, states = [], []
        for text, memory in enumerate(initial_state.split(1)):
            for row in range(*cu_seqlens[text : text + 2].tolist()):
                result, memory = recur(rows[row : row + 1], memory)
                results.append(result)
            states.append(memory)
        return torch.cat(results)[None].to(v.dtype), torch.cat(states)


def make_net() -> DeltaNet:
    torch.manual_seed(0)
    net = DeltaNet(HIDDEN, CONFIG, 1e-6)
    for value in net.parameters():
        value.data.normal_(0, 0.3)
    return net


def spans() -> list[StateSpan]:
    """Fresh, going on with snapshots (two slots keep one of them), few rows, fresh with one."""
    return [
        StateSpan(0, 70, None, ((70, 0),)),
        StateSpan(70, 190, 1, ((64, 5), (112, 6), (120, 1), (120, 7))),
        StateSpan(190, 193, 2, ((1, 8), (2, 9), (3, 2))),
        StateSpan(193, 223, None, ((16, 3), (30, 4))),
    ]


def drawn_states() -> LayerStates:
    states = empty_states(CONFIG, 10, torch.float32, CPU)
    for tensor in (states.conv, states.memory):
        tensor.normal_(generator=torch.Generator().manual_seed(1))
    return states


def read(scan: fla.Scan) -> tuple[Tensor, LayerStates]:
    states = drawn_states()
    rows = torch.randn(223, HIDDEN, generator=torch.Generator().manual_seed(2))
    return ragged_recur([states], spans(), scan)(make_net(), 0, rows), states


def test_all_long_spans_of_a_pass_go_to_the_library_at_once() -> None:
    rule = StandIn()
    found, states = read(FlaScan(rule, torch.float32))
    wanted, own = read(scan_texts)
    # From one state that is kept to the next; few rows, and what is left of one text, are ours.
    assert rule.asked == [[70, 64, 16], [48, 14]]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.memory, own.memory, rtol=1e-4, atol=1e-5)
    assert torch.equal(states.conv, own.conv)
    assert torch.equal(states.memory[1], states.memory[7])
    before = drawn_states().memory
    changed = [slot for slot in range(10) if not torch.equal(states.memory[slot], before[slot])]
    assert changed == list(range(10)), "the control: all of them were written"


def test_numbers_go_to_the_device_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as the same tensors, by which the library knows what it has derived from them."""
    seen: list[tuple[Tensor, Tensor]] = []
    rule = StandIn()

    def spied(**given: Any) -> tuple[Tensor, Tensor]:
        seen.append((given["cu_seqlens"], given["chunk_indices"]))
        return rule(**given)

    rows, layers = torch.randn(223, HIDDEN), [drawn_states() for _ in range(2)]
    go_on = ragged_recur(layers, spans(), FlaScan(spied, torch.float32))
    net = make_net()
    go_on(net, 0, rows)

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("a number went to the device")

    monkeypatch.setattr(torch, "tensor", refuse)
    go_on(net, 1, rows)
    assert seen[0][0] is seen[2][0] and seen[1][1] is seen[3][1] and len(seen) == 4


@pytest.mark.parametrize("is_room", [False, True], ids=["out of memory", "refused"])
def test_a_library_that_fails_is_replaced_by_our_chunks(
    is_room: bool, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail(**given: Any) -> tuple[Tensor, Tensor]:
        calls.append(given)
        raise ValueError("no such heads\nat all") if is_room else torch.OutOfMemoryError()

    scan = FlaScan(fail, torch.float32)
    wanted, own = read(scan_texts)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found, states = read(scan)
            assert torch.equal(found, wanted) and torch.equal(states.memory, own.memory)
    assert scan.trouble == ("no such heads" if is_room else None)
    assert len(calls) == (1 if is_room else 4)
    assert [record.message for record in caplog.records] == [
        "flash-linear-attention is not used any more for prompts: no such heads"
    ] * is_room


def in_place_of_fla(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., Any] | None) -> None:
    module = None if rule is None else SimpleNamespace(chunk_gated_delta_rule=rule)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)  # type: ignore[arg-type]


def forgetful(**given: Any) -> tuple[Tensor, Tensor]:
    return StandIn()(**{**given, "initial_state": torch.zeros_like(given["initial_state"])})


def failing(**_: Any) -> tuple[Tensor, Tensor]:
    raise TypeError("unexpected argument")


def test_the_library_is_used_where_it_computes_what_our_chunks_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_place_of_fla(monkeypatch, StandIn())
    scan, note = try_library(CONFIG, torch.bfloat16, CPU)
    assert isinstance(scan, FlaScan) and scan.dtype == torch.bfloat16
    assert note == "recurrent layers read prompts by flash-linear-attention"
    # Never on a CPU, and not where more than 16 bits are asked for.
    for dtype, device in ((torch.bfloat16, CPU), (torch.float32, torch.device("cuda"))):
        assert choose_scan(CONFIG, dtype, device) == (scan_texts, "")


@pytest.mark.parametrize(
    ("rule", "why"),
    [(None, "None in sys.modules"), (forgetful, "its results differ by"), (failing, "unexpected")],
    ids=["broken", "wrong", "raises"],
)
def test_another_library_is_refused_and_the_reason_told(
    rule: Callable[..., Any] | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place_of_fla(monkeypatch, rule)
    scan, note = try_library(CONFIG, torch.bfloat16, CPU)
    assert scan is scan_texts and why in note
    assert note.startswith("recurrent layers read prompts in plain PyTorch, not by flash-linear-")


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fla.ops.gated_delta_rule", raising=False)
    monkeypatch.setattr(fla, "_MODULE", "fla_that_nobody_has")
    note = try_library(CONFIG, torch.bfloat16, CPU)[1]
    assert note.endswith(": No module named 'fla_that_nobody_has'")
    if find_spec("fla") is None:
        monkeypatch.undo()
        assert try_library(CONFIG, torch.bfloat16, CPU)[1].endswith(": it is not installed")


@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("fla") is None,
    reason="needs a GPU and flash-linear-attention, which Triton's interpreter does not run",
)
def test_the_library_itself_is_taken_on_a_gpu() -> None:
    sizes = DeltaConfig(k_heads=2, v_heads=4, k_dim=128, v_dim=128, kernel=4)
    scan, note = choose_scan(sizes, torch.bfloat16, torch.device("cuda"))
    assert isinstance(scan, FlaScan), note
