"""Models with experts through the fused kernels: the text of the plain engine; interpreted here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine_runs import assert_head_is_alive, ids_of
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.kernel_runs import few_programs, start

from headstart.backends.cuda import exact
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")
_few_programs = pytest.fixture(autouse=True)(few_programs)

# As small as it can be, and one layer: a head has experts, too.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "moe_intermediate_size": 32,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "glm4_moe": {"first_k_dense_replace": 0, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_layer_start_index": 0, "moe_layer_end_index": 0},
}
PROMPTS = [[3, 4, 5, 6, 7], [5, 20]]
SETTINGS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.5, seed=3, max_tokens=4, ignore_eos=True),
]


def model(tiny: Tiny, family: str) -> Path:
    return tiny(family, rate=0.9, seed=0, dtype="F32", **SIZES, **OWN[family])


@pytest.mark.parametrize("family", OWN)
def test_texts_and_acceptance_are_those_of_the_plain_engine(family: str, tiny: Tiny) -> None:
    folder = model(tiny, family)
    fused, plain = start(folder, "on"), start(folder, "off")
    assert fused.backend.name == "cuda" and fused.model.config.layers[0].feed == "moe"
    found, wanted = (engine.generate(PROMPTS, SETTINGS) for engine in (fused, plain))
    assert ids_of(found) == ids_of(wanted)
    assert_head_is_alive(found)
    assert [r.stats.acceptance for r in found] == [r.stats.acceptance for r in wanted]


def test_exact_bits_do_not_depend_on_the_batch(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "TILE", 2)  # fewer rows to fill up
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    found = []
    for prompts, rows in ((PROMPTS[1:], 512), (PROMPTS, 4)):
        engine = start(
            model(tiny, "glm4_moe"), "on", exact=True, speculate=0, max_batched_tokens=rows
        )
        output = engine.generate(prompts, params)[-1].outputs[0]
        found.append((output.token_ids, output.logprobs))
    assert found[0] == found[1] and found[0][1]
