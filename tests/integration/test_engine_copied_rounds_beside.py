"""Copies in device rounds beside layers of all kinds, grammars and draft vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.copying_runs import Parity, tokens_by_origin
from support.engine_runs import ids_of, run
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.copying_rounds import asked, plain_engine, prompts_of, start, take_all, texts_of
from support.kernel_runs import SIZES, few_programs
from support.kernel_sizes import LATENT, SPARSE, WINDOWS

from headstart.vocab.draft_vocab import DraftVocab

pytestmark = pytest.mark.usefixtures("quick_kernels", "no_clock")
_few_programs = pytest.fixture(autouse=True)(few_programs)

_RECURRENT: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {**SIZES, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
# Recurrent layers; latents; windows and heads of several modules; experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _RECURRENT, "qwen3_next": _RECURRENT,
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 0}, **SPARSE, **WINDOWS,
    "glm4_moe": {**_EXPERTS, "first_k_dense_replace": 0},
    "ernie4_5_moe": {**_EXPERTS, "moe_layer_start_index": 0, "moe_layer_end_index": 0},
}  # fmt: skip
USUAL = ("qwen3_5_text", "deepseek_v3", "mimo_v2", "glm4_moe")


def model(tiny: Tiny, family: str, sizes: dict[str, Any]) -> Path:
    return tiny(family, rate=0.9, seed=1, dtype="F32", **sizes)


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return model(tiny, "mimo", SIZES)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    return prompts_of(folder)


@pytest.mark.parametrize("family", unless_long(USUAL, tuple(FAMILIES)))
def test_every_kind_of_model_copies_in_rounds(tiny: Tiny, family: str) -> None:
    folder, params = model(tiny, family, FAMILIES[family]), asked(unless_long(10, 24))
    prompts = prompts_of(folder)
    engine = start(folder, kv_bytes=1 << 20, max_running_requests=2)
    take_all(engine, drafts=2)
    results = run(engine, prompts, params)
    assert ids_of(results) == texts_of(folder, prompts, params)
    assert engine.stats.fast_rounds and not engine.stats.slow_rounds
    assert 0 < engine.stats.copied_accepted < engine.stats.copied_drafts


def test_a_request_with_a_grammar_copies_beside_one_without(
    folder: Path, prompts: list[list[int]]
) -> None:
    engine, params, grammar = start(folder, max_running_requests=2), asked(10), Parity()
    take_all(engine, drafts=1, copied=16)
    found = list[list[list[int]]]()
    for each in (engine, plain_engine(folder)):
        names = [
            each.add(prompts[0], params), each.add(prompts[0], params, grammar=grammar),
        ]  # fmt: skip
        while each.has_work:
            each.step()
        results = [each.collect(name) for name in names]
        found.append(ids_of(results))
        assert [r.stats.copied_accepted > 0 for r in results] == [each is engine] * 2
    assert found[0] == found[1] and found[0][0] != found[0][1]
    assert engine.stats.fast_rounds and not engine.stats.slow_rounds


@pytest.mark.parametrize("own", unless_long([0], [0, 8]))
def test_rounds_copy_what_the_draft_vocabulary_lacks(
    folder: Path, prompts: list[list[int]], own: int
) -> None:
    third = DraftVocab.of(range(0, 64, 3), name="third", vocab_size=64)
    engine, params = start(folder, draft_vocab=[third], draft_vocab_own=own), asked()
    take_all(engine, drafts=1, confirmed=own > 0)
    results = run(engine, prompts, params)
    assert ids_of(results) == texts_of(folder, prompts, params)
    assert engine.stats.fast_rounds and not engine.stats.slow_rounds
    drafted = tokens_by_origin(results)
    assert not drafted["copied"] <= {*third.ids} and drafted["accepted"]
    assert own or drafted["accepted"] <= {*third.ids}
