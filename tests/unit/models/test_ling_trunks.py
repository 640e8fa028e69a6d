"""Ling-3.0's trunk against transformers, from the files that transformers writes: recurrent layers
whose channels fade each by itself, gated latent attention, groups of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.model_reference import (
    SMALL,
    PagedRun,
    in_steps,
    randomised,
    sources,
    transformers_model,
)
from torch.nn.functional import silu

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import UnsupportedFamily
from headstart.models.build import build
from headstart.models.config_reader import model_config
from headstart.models.loading import TrunkNames, load_trunk
from headstart.models.moe_config import Limit
from headstart.models.trunk import Trunk

LING: dict[str, Any] = {
    "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"],
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 61, "max_position_embeddings": 64, "head_dim": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "kv_lora_rank": 16, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3,
    "num_shared_experts": 1, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.7, "first_k_dense_replace": 1, "layer_group_size": 2,
    "short_conv_kernel_size": 4, "kda_safe_gate": True, "kda_lower_bound": -5.0,
    "pad_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as released": {},
    "decays by soft-plus": {"kda_safe_gate": False},
    "one group of experts": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "layers listed": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention",
                        "full_attention"],
    },
    "short convolution": {"short_conv_kernel_size": 2},
}  # fmt: skip
LENGTH = 40
IDS, OTHER = (
    torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (LENGTH, LENGTH - 11)
)


def written(changes: dict[str, Any], folder: Path) -> Any:
    """Their model with random weights, which it has written to a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in {**LING, **changes}.items() if name != "model_type"}
    config = AutoConfig.for_model("bailing_hybrid", **fields)
    model = randomised(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits_equal_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = written(changes, tmp_path)
    trunk = build(Checkpoint.open(tmp_path), device="cpu", dtype="float32").trunk
    expected, expected_other = (
        theirs(torch.tensor([ids]), use_cache=False).logits[0] for ids in (IDS, OTHER)
    )
    whole = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    steps = ((26, 1), (1, 13), (1, 0), (1, 5), (1, 1), (1, 1), (4, 3), (5, 5))
    found = in_steps(PagedRun(trunk, 2, block_size=3), (IDS, OTHER), steps)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], expected_other, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_an_open_gate_would_show(tmp_path: Path) -> None:
    theirs = written({}, tmp_path)
    trunk = build(Checkpoint.open(tmp_path), device="cpu", dtype="float32").trunk
    trunk.layers[1].attention.gate.weight.zero_()  # half open for every head
    found = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    assert (found - theirs(torch.tensor([IDS])).logits[0]).abs().max() > 1e-2


LIMITS: dict[str, Any] = {
    "expert_swiglu_limit_list": [9.0, 0.0, 0.05, None],
    "share_expert_swiglu_limit_list": [9.0, 0.07, 0.0],
}


def test_limits_of_inner_products_are_those_of_each_layer() -> None:
    """transformers leaves them out; a list may be shorter than there are layers, and the dense
    first layer has none."""
    kinds = model_config({**LING, **LIMITS}).layers
    assert [kind.shared_limit for kind in kinds] == [None, Limit(0.07), None, None]
    assert [kind.limit for kind in kinds[1:]] == [None, Limit(0.05), None]


@torch.inference_mode()
def test_limited_experts_equal_the_formula(tmp_path: Path) -> None:
    """silu(gate) is cut off above, up on both sides, with the limits of the two parts."""
    written({}, tmp_path)
    file = tmp_path / "config.json"
    given = json.loads(file.read_text())
    most, shared_most = 0.05, 0.03
    given |= {
        "expert_swiglu_limit_list": [0, 0, most],
        "share_expert_swiglu_limit_list": [0, 0, shared_most],
    }
    file.write_text(json.dumps(given))
    mlp = build(Checkpoint.open(tmp_path), device="cpu", dtype="float64").trunk.layers[2].mlp
    stored = {
        name.partition("layers.2.mlp.")[2]: value.double()
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    x = torch.randn(5, LING["hidden_size"], generator=torch.Generator().manual_seed(1)).double()

    def limited(at: str, row: torch.Tensor, limit: float) -> torch.Tensor:
        gate, up, down = (stored[f"{at}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (silu(row @ gate.T).clamp(max=limit) * (row @ up.T).clamp(-limit, limit)) @ down.T

    chosen, weights = mlp.router(x)
    expected = torch.stack(
        [
            limited("shared_experts.", row, shared_most)
            + sum(
                weight * limited(f"experts.{int(expert)}.", row, most)
                for expert, weight in zip(experts, shares, strict=True)
            )
            for row, experts, shares in zip(x, chosen, weights, strict=True)
        ]
    )
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_kda_lora": False}, "no_kda_lora is false; the engine computes"),
        ({"q_lora_rank": 8}, "q_lora_rank is 8; the engine computes Ling-3.0 without"),
        ({"norm_head": True}, "norm_head is true; the engine computes Ling-3.0 without"),
        ({"gated_attention_proj_granularity_type": "row"}, "computes head_wise and element_wise"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedFamily, match=words):
        model_config({**LING, **changes})


def test_ling_2_5_is_not_taken_for_3_0() -> None:
    marks = ("short_conv_kernel_size", "kda_safe_gate", "kda_lower_bound")
    older = {name: value for name, value in LING.items() if name not in marks}
    with pytest.raises(
        UnsupportedFamily, match=r"'bailing_hybrid'.*the linear attention of Ling-2.5"
    ):
        model_config(older)


# GLM-4.5 computes what Ling-2.0 does: partial rotation, norms of q and k, groups of experts.
GLM: dict[str, Any] = {
    **SMALL, "model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": False,
    "partial_rotary_factor": 0.5, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.7, "norm_topk_prob": True, "first_k_dense_replace": 1,
}  # fmt: skip
LING_2: dict[str, Any] = {
    **{name: value for name, value in GLM.items() if name not in (
        "n_routed_experts", "n_shared_experts", "partial_rotary_factor",
    )},
    "model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], "num_experts": 8,
    "num_shared_experts": 2, "moe_shared_expert_intermediate_size": 24, "rotary_dim": 4,
    "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_rmsnorm": True,
}  # fmt: skip
_LING_2_NAMES = {
    "embed_tokens.": "word_embeddings.", "self_attn.o_proj.": "attention.dense.",
    "self_attn.q_norm.": "attention.query_layernorm.",
    "self_attn.k_norm.": "attention.key_layernorm.",
    "gate.e_score_correction_bias": "gate.expert_bias",
}  # fmt: skip


@torch.inference_mode()
def test_ling_2_equals_glm_4_5_under_other_names() -> None:
    model = transformers_model(GLM)
    tensors = {}
    for name, value in model.state_dict().items():
        for theirs, ours in _LING_2_NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = value
    for name in [n for n in tensors if n.endswith("self_attn.q_proj.weight")]:
        at = name.removesuffix("self_attn.q_proj.weight")
        parts = [tensors.pop(f"{at}self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"{at}attention.query_key_value.weight"] = torch.cat(parts)
    trunk = Trunk(model_config(LING_2), SMALL["max_position_embeddings"], torch.float32)
    load_trunk(trunk, sources(tensors), TrunkNames(embed="model.word_embeddings.weight"))
    expected = model(torch.tensor([IDS]), use_cache=False).logits[0]
    found = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"score_function": "softmax"}, "by sigmoids with a bias"),
        ({"use_rmsnorm": False}, "use_rmsnorm is false"),
        ({"use_qkv_bias": True}, "without biases"),
        ({"norm_head": True}, "normalised LM head"),
        ({"model_type": "bailing_hybrid", "kv_lora_rank": 16}, "linear attention of Ling-2.5"),
    ],
)
def test_what_ling_2_is_computed_without_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedFamily, match=words):
        model_config({**LING_2, **changes})
