"""Latent attention through the fused kernels: the text of the plain engine; interpreted here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engine_runs import assert_head_is_alive, ids_of
from support.interpreted_bf16 import repair_bf16
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.kernel_runs import few_programs, start
from support.kernel_sizes import LATENT, SPARSE

from headstart.backends.cuda import exact
from headstart.engine.engine import Engine
from headstart.models.mla import LatentAttention
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")
_few_programs = pytest.fixture(autouse=True)(few_programs)

# A dense layer, and one with experts in groups; the head has experts, too.
SIZES = {
    **LATENT, "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
}  # fmt: skip
# The first is longer than what is compared with latents in a prompt.
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [5, 20]]
SETTINGS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.5, seed=3, max_tokens=4, ignore_eos=True),
]


def model(tiny: Tiny, family: str = "deepseek_v3") -> Path:
    seed = 5 if family == "deepseek_v32" else 2  # with which some drafts are accepted
    return tiny(family, rate=0.9, seed=seed, dtype="F32", **SPARSE.get(family, SIZES))


# With an indexer rows see three entries, far fewer than the first prompt has.
LONG = [
    *(("deepseek_v3", *sizes) for sizes in [(3, 18), (0, 512), (1, 18), (3, 512)]),
    *((family, *sizes) for family in SPARSE for sizes in [(0, 512), (3, 18), (2, 512)]),
]


@pytest.mark.parametrize(
    ("family", "drafts", "batch"),
    unless_long([("glm_moe_dsa", 2, 512)], LONG),
)
def test_texts_and_acceptance_are_those_of_the_plain_engine(
    family: str, drafts: int, batch: int, tiny: Tiny
) -> None:
    folder = model(tiny, family)
    fused, plain = (
        start(folder, kernels, speculate=drafts, max_batched_tokens=batch)
        for kernels in ("on", "off")
    )
    assert fused.backend.name == "cuda" and fused.model.config.mla is not None
    found, wanted = (engine.generate(PROMPTS, SETTINGS) for engine in (fused, plain))
    assert ids_of(found) == ids_of(wanted)
    assert [r.stats.acceptance for r in found] == [r.stats.acceptance for r in wanted]
    assert fused.pool.num_used == 0 and not fused.loop.rounds.requests
    if drafts:
        assert_head_is_alive(found)


def test_a_request_that_stays_with_the_host_gets_its_plain_text(tiny: Tiny) -> None:
    """Its rows are few, and lie beside those of a prompt. Here drafts come from rounded weights."""
    each = [replace(SETTINGS[0], repetition_penalty=1.1), SETTINGS[1]]
    wanted = ids_of(start(model(tiny), "off", speculate=0).generate(PROMPTS, each))
    fused = start(model(tiny), "on", speculate=1, draft_weights="int8")
    assert ids_of(fused.generate(PROMPTS, each)) == wanted
    assert fused.model.head is not None
    block = fused.model.head.module(1).block
    assert isinstance(block.attention, LatentAttention) and block.attention.compress.int8


@pytest.mark.parametrize("family", unless_long([], ["deepseek_v3", *SPARSE]))
def test_exact_texts_depend_on_nothing_but_the_request(
    family: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once without drafts; with drafts, prompts in chunks, and memory that runs out."""
    if not torch.cuda.is_available():
        repair_bf16(monkeypatch)
        monkeypatch.setattr(exact, "TILE", 4)  # fewer rows to fill up, or it would take a minute
    layers = {} if family == "glm_moe_dsa" else {"num_hidden_layers": 1}
    sizes = {**SPARSE.get(family, SIZES), **layers, "max_position_embeddings": 64}
    folder = tiny(family, rate=0.9, seed=2, dtype="F32", **sizes)
    each = [replace(SETTINGS[0], logprobs=2), replace(SETTINGS[1], top_k=9)]
    prompts = [PROMPTS[0][:5], PROMPTS[1]]
    memory = 5 * start(folder, "off", speculate=3).backend.block_bytes(4) // 2  # bf16 takes half
    found = []
    for options in (
        {"speculate": 0}, {"speculate": 3, "max_batched_tokens": 4, "kv_bytes": memory},
    ):  # fmt: skip
        own = {"block_size": 4, "kv_bytes": 1 << 20, "max_running_requests": 2, **options}
        engine = Engine(folder, dtype="bfloat16", kernels="on", exact=True, **own)
        outputs = [result.outputs[0] for result in engine.generate(prompts, each)]
        told = [(one.logprob, one.top) for one in outputs[0].logprobs or ()]
        found.append(([output.token_ids for output in outputs], told))
    assert found[0] == found[1] and len(found[0][1]) == 4
    assert engine.stats.acceptance.drafted[0] > 0
