"""Models with recurrent layers through the fused kernels: the text of the plain engine, whatever is
rejected and whichever request leaves the rounds; interpreted here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import assert_head_is_alive, ids_of
from support.interpreted_bf16 import repair_bf16
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.kernel_runs import few_programs, start

from headstart.backends.cuda import exact
from headstart.backends.cuda.device_rounds import CapturedRounds
from headstart.backends.cuda.recurrent_prompts import PromptRows
from headstart.engine.engine import Engine
from headstart.models.recurrence import StateSpan
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")
_few_programs = pytest.fixture(autouse=True)(few_programs)

# As small as it can be: one recurrent layer, one that attends.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64,
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16,
    "linear_value_head_dim": 12, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_next": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
PROMPTS = [[3, 4, 5, 6, 7], [5, 20]]
SETTINGS = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.5, seed=3, max_tokens=5, ignore_eos=True),
]


def model(tiny: Tiny, family: str) -> Path:
    return tiny(family, rate=0.9, seed=0, dtype="F32", **SIZES, **OWN[family])


def test_texts_and_acceptance_are_those_of_the_plain_engine(tiny: Tiny) -> None:
    """With experts, too."""
    folder = model(tiny, "qwen3_next")
    fused, plain = start(folder, "on"), start(folder, "off")
    assert fused.backend.name == "cuda" and fused.model.config.layers[0].mixer == "delta"
    found, wanted = (engine.generate(PROMPTS, SETTINGS) for engine in (fused, plain))
    assert ids_of(found) == ids_of(wanted)
    assert_head_is_alive(found)
    assert [r.stats.acceptance for r in found] == [r.stats.acceptance for r in wanted]
    fused.scheduler.check()


@pytest.mark.parametrize("family", unless_long([], list(OWN)))  # unit tests show it for one layer
def test_exact_texts_depend_on_nothing_but_the_request(
    family: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once without drafts; with drafts, prompts in chunks, and memory that runs out."""
    if not torch.cuda.is_available():
        repair_bf16(monkeypatch)
        monkeypatch.setattr(exact, "TILE", 4)  # fewer rows to fill up, or it would take a minute
    folder = tiny(family, rate=0.9, seed=0, dtype="F32", **SIZES, **OWN[family])
    each = [replace(own, logprobs=2) for own in SETTINGS]
    found = []
    for options in ({"speculate": 0}, {"speculate": 2, "max_batched_tokens": 3}):
        engine = Engine(
            folder, dtype="bfloat16", kernels="on", exact=True, block_size=4, kv_bytes=1 << 18,
            max_running_requests=2, **options,
        )  # fmt: skip
        outputs = [result.outputs[0] for result in engine.generate(PROMPTS, each)]
        told = [[(one.logprob, one.top) for one in own.logprobs or ()] for own in outputs]
        found.append(([own.token_ids for own in outputs], told))
    assert found[0] == found[1]
    assert engine.stats.acceptance.drafted[0] > 0


def test_a_request_that_leaves_rounds_goes_on_from_the_accepted_row(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in rounds: recurrent states are brought up to date for the host."""
    folder = model(tiny, "qwen3_5_text")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    wanted = ids_of(start(folder, "off").generate(PROMPTS[:1], params))
    fused = start(folder, "on")
    rounds = fused.loop.rounds
    assert rounds is not None and isinstance(rounds._device, CapturedRounds)
    name = fused.add(PROMPTS[0], params)
    for _ in range(3):
        fused.step()
    recurrent = rounds._device.batch.recurrent
    assert recurrent is not None and recurrent.replays.any()
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "_extend", lambda ahead: False)
        fused.step()
    assert not recurrent.replays.any() and fused.has_work
    while fused.has_work:
        fused.step()
        fused.scheduler.check()
    assert fused.collect(name).outputs[0].token_ids == wanted[0]


def test_prompts_share_launches_and_go_on_behind_a_cached_prefix(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(5 * i) % 61 + 2 for i in range(33)]
    prompts = [prompt, [*range(2, 28)], [*prompt[:32], *range(9, 34)]]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    asked: list[list[tuple[int, bool, list[int]]]] = []
    of = PromptRows.of

    def spied(spans: Sequence[StateSpan], device: torch.device) -> PromptRows:
        asked.append([(s.stop - s.start, s.source is not None, [rows for rows, _ in s.keeps])
                      for s in spans])  # fmt: skip
        return of(spans, device)

    folder = model(tiny, "qwen3_5_text")
    fused, plain = (
        start(folder, kernels, max_batched_tokens=64, speculate=0) for kernels in ("on", "off")
    )
    monkeypatch.setattr(PromptRows, "of", spied)
    found, wanted = (
        [*e.generate(prompts[:2], params), *e.generate(prompts[2:], params)] for e in (fused, plain)
    )
    assert ids_of(found) == ids_of(wanted)
    together, behind = asked[0], asked[1]
    assert together == [(33, False, [32, 33]), (26, False, [24, 26])]
    assert behind == [(25, True, [24, 25])], "what the first prompt left is not computed again"
