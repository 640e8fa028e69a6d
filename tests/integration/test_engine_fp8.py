"""fp8 and stored quantised weights through whole engines, interpreted and so very small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine_runs import assert_head_is_alive, ids_of
from support.kernel_runs import SIZES, few_programs
from support.kernel_sizes import LATENT
from support.long_runs import long_only, unless_long
from support.quantized_models import quantized_model
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.interpreted_bf16 import repair_fp8

from headstart.backends.cuda.fp8_linear import KernelFp8
from headstart.backends.cuda.group_linear import KernelGroups
from headstart.backends.cuda.kernel_linear import KernelLinear
from headstart.backends.cuda.quantized_experts import KernelGroupStack
from headstart.engine.engine import Engine
from headstart.errors import ConfigError
from headstart.models.feed_forward import MoE
from headstart.models.linear import Linear
from headstart.models.quantized import Fp8Stack
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")

# The second has more rows than the skinny kernels take.
PROMPTS = [[33, 11, 60], list(range(2, 22))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_k=6, max_tokens=3, ignore_eos=True),
]
FOUR = replace(PARAMS[0], max_tokens=4)

# Parts of merged matrices end with blocks of 128.
BLOCKS: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 128,
}  # fmt: skip
GROUPS: dict[str, Any] = {**SIZES, "head_dim": 32}  # two groups of every row
OPTIONS: dict[str, Any] = {
    "kernels": "on", "block_size": 4, "kv_bytes": 1 << 18, "max_model_len": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _rounds_like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    repair_fp8(monkeypatch)


def start(tiny: Tiny, weights: str = "fp8", **settings: Any) -> Engine:
    folder = tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)
    return Engine(folder, device="cpu", dtype="float32", weights=weights, **{**OPTIONS, **settings})


def test_drafts_change_nothing_and_the_head_is_alive(tiny: Tiny) -> None:
    wanted = ids_of(start(tiny, speculate=0).generate(PROMPTS, PARAMS))
    found = start(tiny, speculate=3).generate(PROMPTS[:1], PARAMS[:1])
    assert ids_of(found) == wanted[:1]
    assert_head_is_alive(found)
    reduced = start(tiny, speculate=1, draft_vocab=list(range(0, 64, 2)))
    assert ids_of(reduced.generate(PROMPTS[1:], PARAMS[1:])) == wanted[1:]


def test_every_product_is_fp8_and_nothing_else_is(tiny: Tiny) -> None:
    engine = start(tiny)
    trunk, head = engine.model.trunk, engine.model.head
    assert head is not None
    products = [m for part in (trunk, head) for m in part.modules() if isinstance(m, Linear)]
    rounded = [product for product in products if isinstance(product, KernelFp8)]
    assert len(rounded) == 4 + 1 + 4  # a layer; fuse, block
    assert [product for product in products if product not in rounded] == [trunk.lm_head]
    assert trunk.embed.dtype == trunk.final_norm.weight.dtype == torch.float32


def test_products_are_rounded_a_little(tiny: Tiny) -> None:
    rounded, plain = start(tiny, speculate=0), start(tiny, "as-dtype", speculate=0)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    found, wanted = (e.model.trunk.layers[0].mlp.gate_up(x) for e in (rounded, plain))
    error = (found - wanted).norm() / wanted.norm()
    assert 0.001 < error < 0.05


@pytest.mark.parametrize(
    ("form", "sizes", "prompt"),
    [
        ("fp8-block", BLOCKS, [47, 47]),
        *unless_long([], [("awq", GROUPS, [20, 47]), ("gptq-sorted", GROUPS, [20, 47])]),
    ],
)  # fmt: skip
def test_drafts_change_nothing_in_checkpoints_as_they_are_stored(
    form: str, sizes: dict[str, Any], prompt: list[int], tiny: Tiny
) -> None:
    folder = quantized_model(tiny, form, **sizes)
    counts = unless_long((0, 3), (0, 1, 2, 3))
    found = []
    for drafts in counts:
        engine = Engine(folder, device="cpu", dtype="float32", speculate=drafts, **OPTIONS)
        kinds = {type(own) for own in engine.model.trunk.layers.modules()}
        assert kinds & {KernelFp8, KernelGroups} and Linear not in kinds
        assert any("weights stay as stored" in note for note in engine.notes)
        found.append(engine.generate([prompt], FOUR))
    assert all(ids_of(results) == ids_of(found[0]) for results in found)
    assert_head_is_alive(found[-1])


# Of one layer with experts; the latter has latent attention, too.
EXPERTS: dict[str, dict[str, Any]] = {
    "glm4_moe": {**GROUPS, "moe_intermediate_size": 64, "first_k_dense_replace": 0,
                 "num_experts_per_tok": 2},
    "deepseek_v3": {**LATENT, "num_hidden_layers": 1, "moe_intermediate_size": 128,
                    "first_k_dense_replace": 0, "num_experts_per_tok": 2, "q_lora_rank": 128},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "form"),
    [("glm4_moe", "awq"),
     *unless_long([], [("deepseek_v3", "fp8-block"), ("glm4_moe", "fp8-row")])],
)  # fmt: skip
def test_experts_run_as_they_are_stored(
    family: str, form: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_programs(monkeypatch)
    folder = quantized_model(tiny, form, family, **EXPERTS[family])
    plain = Engine(folder, device="cpu", dtype="float32", **{**OPTIONS, "kernels": "off"})
    # Rounding to pairs of integers is too fine to show: it is the plain engine's text.
    found = [plain.generate([[14, 39]], FOUR)] if form == "awq" else []
    for drafts in unless_long((2,) if found else (0, 2), (0, 1, 2, 3, 4)):
        engine = Engine(folder, device="cpu", dtype="float32", speculate=drafts, **OPTIONS)
        (layer,) = engine.model.trunk.layers
        assert isinstance(layer.mlp, MoE)
        stacks = {type(own) for own in layer.mlp.experts.children()}
        assert stacks == {Fp8Stack if form.startswith("fp8") else KernelGroupStack}
        inside = [own for own in layer.modules() if isinstance(own, Linear)]
        assert inside and all(isinstance(own, KernelLinear) for own in inside)
        assert not any("among experts" in note for note in engine.notes)
        found.append(engine.generate([[14, 39]], FOUR))
    assert all(ids_of(results) == ids_of(found[0]) for results in found)
    assert_head_is_alive(found[-1])


@long_only
def test_fp8_rounds_plain_experts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the router, the embedding and the LM head."""
    few_programs(monkeypatch)
    folder = tiny("glm4_moe", rate=0.9, seed=0, dtype="F32", **EXPERTS["glm4_moe"])
    options = {**OPTIONS, "device": "cpu", "dtype": "float32", "weights": "fp8"}
    engines = [Engine(folder, speculate=drafts, **options) for drafts in (0, 2)]
    found = [engine.generate([[33, 11]], replace(PARAMS[0], max_tokens=3)) for engine in engines]
    assert ids_of(found[0]) == ids_of(found[1])
    (layer,) = engines[0].model.trunk.layers
    assert isinstance(layer.mlp, MoE) and layer.mlp.shared is not None
    kinds = [type(own) for own in (*layer.mlp.experts.children(), *layer.mlp.shared.children())]
    assert kinds == [Fp8Stack, Fp8Stack, KernelFp8, KernelFp8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": "auto"}, "weights fp8 is a GPU format; use weights int8 on a CPU"),
        ({"kernels": "off"}, "weights fp8 and kernels off were both given"),
        ({"exact": True}, "exact and weights fp8 were both given"),
    ],
    ids=["cpu", "kernels off", "exact"],
)
def test_where_fp8_does_not_run(tiny: Tiny, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tiny, **settings)
