"""Experts against transformers' blocks: every way to route, and both ways to store experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.model_reference import SMALL, randomised, sources
from torch import Tensor, nn

from headstart.backends.cuda.int8 import Int8Rows, add_int8
from headstart.backends.torch.tuning import tune
from headstart.backends.weights import Int8Linear, convert_weights
from headstart.errors import BadConfig, UnsupportedFamily
from headstart.families.experts import is_fused_experts, split_name
from headstart.models.config import LayerKind
from headstart.models.feed_forward import MoE
from headstart.models.linear import Linear, Stack
from headstart.models.loading import materialize
from headstart.models.moe_config import MoeConfig, moe_config
from headstart.models.weight_map import Targets, layer_targets

HIDDEN, EXPERTS, WIDTH = SMALL["hidden_size"], 8, 24
PLAIN = MoeConfig(
    num_experts=EXPERTS, top_k=3, width=WIDTH, shared_width=WIDTH, shared_gate=False,
    scoring="sigmoid", correction=True, num_groups=1, top_groups=1, renormalise=True,
    least_sum=1e-20, scale=1.0,
)  # fmt: skip
_GLM = {"n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH, "num_experts_per_tok": 3}
_QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "num_experts_per_tok": 3,
         "shared_expert_intermediate_size": 40}  # fmt: skip
_ERNIE = {"moe_num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "moe_k": 3,
          "moe_num_shared_experts": 2, "moe_norm_min": 0.5}  # fmt: skip
_SOFTMAX = replace(PLAIN, scoring="softmax", correction=False, shared_width=40, shared_gate=True)

# name -> module of transformers, its class, its config; ours
BLOCKS: dict[str, tuple[str, str, dict[str, Any], MoeConfig]] = {
    "sigmoid": ("glm4_moe", "Glm4MoeMoE", _GLM, PLAIN),
    "sigmoid, groups and scale": (
        "glm4_moe", "Glm4MoeMoE",
        {**_GLM, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        replace(PLAIN, num_groups=4, top_groups=2, scale=2.5),
    ),
    "sigmoid, weights as they are": (
        "glm4_moe", "Glm4MoeMoE", {**_GLM, "norm_topk_prob": False},
        replace(PLAIN, renormalise=False),
    ),
    "softmax, gated shared expert": ("qwen3_next", "Qwen3NextSparseMoeBlock", _QWEN, _SOFTMAX),
    "softmax, weights as they are": (
        "qwen3_next", "Qwen3NextSparseMoeBlock", {**_QWEN, "norm_topk_prob": False},
        replace(_SOFTMAX, renormalise=False),
    ),
    "softmax with correction and a least sum": (
        "ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", _ERNIE,
        replace(PLAIN, scoring="softmax", shared_width=2 * WIDTH, least_sum=0.5),
    ),
}  # fmt: skip


def their_block(module: str, name: str, fields: dict[str, Any]) -> nn.Module:
    from importlib import import_module

    from transformers import AutoConfig

    config = AutoConfig.for_model(module, **{**SMALL, **fields})
    config._experts_implementation = "eager"
    found = import_module(f"transformers.models.{module}.modeling_{module}")
    return randomised(getattr(found, name)(config).eval())


def stored(block: nn.Module, *, fused: bool) -> dict[str, Tensor]:
    """A block's weights as a release would store them."""
    result: dict[str, Tensor] = {}
    for name, value in block.state_dict().items():
        name = f"mlp.{name}".replace("mlp.gate.moe_statics.", "mlp.moe_statics.")
        if fused or not is_fused_experts(name):
            result[name] = value
            continue
        for expert, whole in enumerate(value):
            kinds = ("down",) if name.endswith("down_proj") else ("gate", "up")
            for kind, part in zip(kinds, whole.chunk(len(kinds)), strict=True):
                result[split_name(name, expert, kind)] = part
    return result


def our_block(model_type: str, config: MoeConfig, tensors: dict[str, Tensor]) -> MoE:
    """The same weights, put where loading puts them."""
    from types import SimpleNamespace

    block = MoE(config, HIDDEN)
    sizes: Any = SimpleNamespace(model_type=model_type, moe=config)
    targets: Targets = []
    state = block.state_dict()
    for name in state:
        targets += layer_targets(name, "", f"mlp.{name}", sizes, LayerKind(), sources(tensors))
    assert {name for name, _ in targets} == set(tensors)
    for name, target in targets:
        part = target.of(state[target.parameter])
        part.copy_(tensors[name].view_as(part))
    return block


@torch.inference_mode()
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "one by one"])
@pytest.mark.parametrize(("module", "name", "fields", "config"), BLOCKS.values(), ids=BLOCKS)
def test_a_block_equals_that_of_transformers(
    module: str, name: str, fields: dict[str, Any], config: MoeConfig, fused: bool
) -> None:
    theirs = their_block(module, name, fields)
    ours = our_block(module, config, stored(theirs, fused=fused))
    x = torch.randn(33, HIDDEN, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(ours(x), theirs(x[None])[0], atol=1e-5, rtol=1e-5)


def block(dtype: torch.dtype = torch.float64, **changes: Any) -> MoE:
    result = MoE(replace(PLAIN, **changes), HIDDEN)
    draw = torch.Generator().manual_seed(1)
    for value in result.state_dict().values():
        value.copy_(torch.randn(value.shape, generator=draw) * 0.3)
    return result.to(dtype)


def rows(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others() -> None:
    moe, x = block(), rows(40)
    alone = torch.cat([moe(row[None]) for row in x])
    torch.testing.assert_close(moe(x), alone, atol=1e-12, rtol=1e-12)
    assert moe(x[:0]).shape == (0, HIDDEN)


@torch.inference_mode()
def test_an_expert_is_computed_once_per_batch() -> None:
    moe, calls = block(), []
    inner = moe.experts.down.product()

    def product() -> Any:
        return lambda x, number: calls.append((number, len(x))) or inner(x, number)

    moe.experts.down.product = product
    moe(rows(40))
    assert len({number for number, _ in calls}) == len(calls) <= EXPERTS
    assert sum(count for _, count in calls) == 40 * 3


def test_every_gradient_equals_a_numerical_one() -> None:
    moe, x = block(num_groups=2, top_groups=1, top_k=2, width=3, shared_width=3), rows(5)
    names = dict(moe.requires_grad_(True).named_parameters())

    def forward(*values: Tensor) -> Any:
        return torch.func.functional_call(moe, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(forward, tuple(names.values()), fast_mode=True)
    assert "router.correction" not in names, "it has no gradient: nothing may decay it"


def test_the_router_stays_in_fp32_in_a_bf16_model() -> None:
    with torch.device("meta"):
        moe = MoE(PLAIN, HIDDEN)
    materialize(moe, torch.device("cpu"), torch.bfloat16)
    assert moe.router.weight.dtype == moe.router.correction.dtype == torch.float32
    assert moe.experts.down.weight.dtype == torch.bfloat16
    with torch.inference_mode():
        exact = block(torch.float32)
        rounded = block(torch.bfloat16)
        x = rows(9, torch.bfloat16)
        assert rounded(x).dtype == torch.bfloat16
        torch.testing.assert_close(rounded(x).float(), exact(x.float()), atol=0.3, rtol=0.1)


@torch.inference_mode()
def test_experts_in_int8_are_near_and_the_router_is_not_rounded() -> None:
    moe, x = block(torch.float32), rows(20, torch.float32)
    expected, choice = moe(x), moe.router(x)
    convert_weights(moe, Int8Linear)
    assert all(torch.equal(a, b) for a, b in zip(moe.router(x), choice, strict=True))
    difference = (moe(x) - expected).abs().max()
    assert 0 < difference < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"num_experts_per_tok": 9}, BadConfig, "asks for 9 of 8 experts"),
        ({"num_experts_per_tok": None}, BadConfig, "asks for None of 8"),
        ({"n_group": 3}, BadConfig, "8 experts in 3 groups"),
        ({"n_group": 4, "topk_group": 1}, BadConfig, "takes 3 of 1 groups"),
        ({"topk_method": "greedy"}, UnsupportedFamily, "topk_method 'greedy'"),
        ({"scoring_func": "tanh"}, UnsupportedFamily, "scoring_func 'tanh'"),
    ],
    ids=["too many", "no number", "odd groups", "small groups", "method", "scores"],
)
def test_routing_that_cannot_be_meant_is_refused(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        moe_config({**_GLM, **change}, ())


@torch.inference_mode()
def test_products_chosen_by_stop_watch_give_the_same_result() -> None:
    moe, x = block(torch.float32), rows(20, torch.float32)
    expected = moe(x)
    chosen = tune(moe)
    assert set(chosen) == {
        tuple(part.weight.shape[-2:]) for part in moe.modules() if isinstance(part, Linear | Stack)
    }
    torch.testing.assert_close(moe(x), expected, atol=1e-5, rtol=1e-5)
    for part in (moe.experts.gate_up, moe.experts.down):
        part.plan = ("columns",) * 8
    torch.testing.assert_close(moe(x), expected, atol=1e-5, rtol=1e-5)


def test_what_experts_read_whole_gets_no_copy_in_8_bits() -> None:
    """The kernels read shared experts and their gate as they are; a copy would only take memory."""
    moe = MoE(replace(PLAIN, shared_gate=True), HIDDEN)
    head = nn.ModuleDict({"fuse": Linear(HIDDEN, HIDDEN), "experts": moe})
    for value in head.parameters():
        value.data.normal_()
    add_int8(head)
    rounded = [name for name, part in head.named_modules() if isinstance(part, Int8Rows)]
    assert rounded == ["fuse.int8"]
    assert moe.shared is not None and isinstance(moe.shared.down, Linear)  # it would be one of them
