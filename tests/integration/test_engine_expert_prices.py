"""What rounds of experts cost is timed with rows that differ: alike ones would read few experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernel_runs import few_programs, start
from support.tiny_fixture import Tiny

from headstart.backends.base import CacheSizes, blank_tokens
from headstart.engine.auto.blank_passes import BlankPasses
from headstart.engine.auto.profile import profile_passes
from headstart.models.feed_forward import MoE
from headstart.sampling.params import SamplingParams

EXPERTS, CHOSEN, BATCH, DRAFTS = 16, 2, 4, 3
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "moe_intermediate_size": 16,
    "first_k_dense_replace": 0, "num_experts_per_tok": CHOSEN, "n_routed_experts": EXPERTS,
}  # fmt: skip
# Sixteen rows that choose by chance have 14 experts of 16 on average.
MANY = 10


@pytest.fixture
def folder(tiny: Tiny) -> Path:
    return tiny("glm4_moe", rate=0.9, seed=0, dtype="F32", **SIZES)


def test_blank_tokens_differ_and_lie_in_the_vocabulary() -> None:
    tokens = blank_tokens(500, 1000, first=7)
    assert len(set(tokens)) > 450 and min(tokens) >= 0 and max(tokens) < 1000
    assert tokens[3:] == blank_tokens(497, 1000, first=10)


def test_verifications_are_timed_over_many_experts(folder: Path) -> None:
    engine = start(folder, "off", speculate=DRAFTS)
    router = next(m for m in engine.backend.trunk.modules() if isinstance(m, MoE)).router
    asked: list[torch.Tensor] = []
    router.register_forward_hook(lambda module, given, result: asked.append(result[0]))
    passes = BlankPasses(engine.backend, None, max_rows=64)
    greedy = SamplingParams(temperature=0)
    with torch.inference_mode():
        passes.verify_seconds(BATCH, [DRAFTS], greedy)
        assert {chosen.shape[0] for chosen in asked} == {BATCH * (DRAFTS + 1)}
        assert all(len(chosen.unique()) >= MANY for chosen in asked)
        costs = profile_passes(passes, BATCH, greedy)
    assert costs.menu and costs.verify_seconds(BATCH, BATCH) > 0


def test_device_rounds_are_timed_over_many_experts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("triton")
    request.getfixturevalue("quick_kernels")
    from headstart.backends.cuda import experts
    from headstart.backends.cuda.device_rounds import CapturedRounds
    from headstart.backends.cuda.round_profile import BlankRounds
    from headstart.backends.cuda.shapes import RoundShape

    few_programs(monkeypatch)
    engine = start(folder, "on", speculate=DRAFTS)
    assert engine.loop.rounds is not None
    device = engine.loop.rounds._device
    assert isinstance(device, CapturedRounds)
    asked: list[torch.Tensor] = []
    usual = experts.choose_experts

    def choose(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = usual(*given)
        asked.append(chosen[:, :CHOSEN])
        return chosen, weights

    monkeypatch.setattr(experts, "choose_experts", choose)
    size = device.batch.count
    with torch.inference_mode():
        BlankRounds(device, CacheSizes(32, 4))._fill(RoundShape.usual(size, DRAFTS), 9)
        device.graphs.run(RoundShape.usual(size, DRAFTS))
    rows = size * (DRAFTS + 1)
    chosen = asked[-1]  # of the trunk, which comes after the head
    assert len(chosen) == rows
    by_chance = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** rows)
    assert len(chosen.unique()) > 0.6 * by_chance > CHOSEN
