"""Latent attention through the fused kernels: the text of the plain engine; interpreted here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engine_runs import assert_head_is_alive, ids_of
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.kernel_runs import few_programs, start
from support.kernel_sizes import LATENT, SPARSE

from headstart.backends.options import BackendOptions
from headstart.backends.select import select
from headstart.errors import ConfigError
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
    unless_long([("deepseek_v3", 3, 18), ("glm_moe_dsa", 2, 512)], LONG),
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


def test_exact_is_refused_on_a_gpu(tiny: Tiny) -> None:
    on_gpu = replace(start(model(tiny), "off").model, device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"latent attention, whose kernels are inexact\. Leave"):
        select(on_gpu, BackendOptions(exact=True))
    assert select(on_gpu, BackendOptions()).name == "cuda"
