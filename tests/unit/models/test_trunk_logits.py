"""Trunks against transformers: every option that changes numbers, through the paged cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_reference import (
    SMALL,
    PagedRun,
    in_steps,
    our_trunk,
    randomised,
    transformers_model,
)

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.models.config_reader import model_config
from headstart.models.rope import RotaryTable, rope_config

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
GLM = {
    "model_type": "glm4_moe", "attention_bias": True, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "routed_scaling_factor": 1.7,
}  # fmt: skip
ERNIE = {
    "model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12, "head_dim": 6,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
# as released, but for the size of the context
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
SPARSE = {
    **DEEPSEEK, "model_type": "deepseek_v32", "index_n_heads": 8, "index_head_dim": 14,
    "index_topk": 7,
}  # fmt: skip
MIMO_V2 = {
    "model_type": "mimo_v2_flash", "num_hidden_layers": 4, "head_dim": 12, "v_head_dim": 6,
    "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5, "rope_theta": 5e6,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 12,
    "swa_v_head_dim": 6, "swa_rope_theta": 10000.0, "sliding_window_size": 5,
    "add_swa_attention_sink_bias": True, "attention_value_scale": 0.707,
    "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 0, 1],
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
}  # fmt: skip
MELLUM = {
    "model_type": "mellum", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 5, "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, a K/V head per head": {"model_type": "llama", "num_key_value_heads": 4},
    "llama, one K/V head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, wide heads": {"model_type": "llama", "head_dim": 16},
    "llama, no head_dim": {"model_type": "llama", "head_dim": None},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, linear rope": {
        "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.5},
    },
    "llama, llama3 rope": {"model_type": "llama", "rope_scaling": LLAMA3, "rope_theta": 5e4},
    "llama, yarn": {"model_type": "llama", "rope_scaling": YARN},
    "mistral, wide heads": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "llama, yarn with attention factor": {
        "model_type": "llama", "rope_scaling": {**YARN, "attention_factor": 1.4},
    },
    "llama, yarn with mscale": {
        "model_type": "llama",
        "rope_scaling": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
    },
    "llama, yarn with betas": {
        "model_type": "llama", "rope_scaling": {**YARN, "beta_fast": 0.9, "beta_slow": 0.2},
        "rope_theta": 100.0, "head_dim": 16,
    },
    "llama, yarn without truncation": {
        "model_type": "llama", "rope_scaling": {**YARN, "truncate": False}, "head_dim": 16,
        "rope_theta": 100.0,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, one K/V head": {"model_type": "qwen2", "num_key_value_heads": 1},
    "qwen2, windows above layer 1": {
        "model_type": "qwen2", **WINDOWS, "max_window_layers": 1,
    },
    "qwen2, windows in every layer": {"model_type": "qwen2", **WINDOWS, "max_window_layers": 0},
    "qwen2, windows that no layer reaches": {"model_type": "qwen2", **WINDOWS},
    "qwen2, windows switched off": {
        "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 5,
        "max_window_layers": 0,
    },
    "qwen2, layer types": {
        "model_type": "qwen2", **WINDOWS, "max_window_layers": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen2, yarn": {"model_type": "qwen2", "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3"},
    "qwen3, biases": {"model_type": "qwen3", "attention_bias": True},
    "qwen3, tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3, wide heads": {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 1},
    "qwen3, layer types": {
        "model_type": "qwen3", **WINDOWS,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen3, yarn": {"model_type": "qwen3", "rope_scaling": YARN},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, silent about weights": {
        name: value for name, value in QWEN3_MOE.items() if name != "norm_topk_prob"
    },
    "qwen3_moe, dense layers by list": {**QWEN3_MOE, "mlp_only_layers": [0, 2]},
    "qwen3_moe, experts in every other layer": {**QWEN3_MOE, "decoder_sparse_step": 2},
    "qwen3_moe, wide heads": {**QWEN3_MOE, "head_dim": 16, "num_key_value_heads": 1},
    "qwen3_moe, biases": {**QWEN3_MOE, "attention_bias": True},
    "qwen3_moe, tied": {**QWEN3_MOE, "tie_word_embeddings": True},
    "qwen3_moe, yarn": {**QWEN3_MOE, "rope_scaling": YARN},
    "mimo, as qwen2": {"model_type": "mimo", "attention_bias": True},
    "glm4_moe": GLM,
    "glm4_moe, q/k norms": {**GLM, "use_qk_norm": True},
    "glm4_moe, no biases": {**GLM, "attention_bias": False},
    "glm4_moe, groups": {**GLM, "n_group": 4, "topk_group": 2},
    "glm4_moe, weights as they are": {**GLM, "norm_topk_prob": False},
    "glm4_moe, two shared experts": {**GLM, "n_shared_experts": 2},
    "glm4_moe, all layers with experts": {**GLM, "first_k_dense_replace": 0},
    "glm4_moe, all layers dense": {**GLM, "first_k_dense_replace": 3},
    "glm4_moe, a quarter rotated": {**GLM, "partial_rotary_factor": 0.25, "head_dim": 16},
    "glm4_moe, yarn": {**GLM, "rope_scaling": dict(YARN)},
    "glm4_moe, tied": {**GLM, "tie_word_embeddings": True},
    "ernie4_5_moe": ERNIE,
    "ernie4_5_moe, tied": {**ERNIE, "tie_word_embeddings": True},
    "ernie4_5_moe, no shared experts": {**ERNIE, "moe_num_shared_experts": 0},
    "ernie4_5_moe, every other layer": {**ERNIE, "moe_layer_interval": 2},
    "ernie4_5_moe, experts in the first layer only": {
        **ERNIE, "moe_layer_start_index": 0, "moe_layer_end_index": 0,
    },
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, yarn": {**DEEPSEEK, "rope_scaling": DEEPSEEK_YARN},
    "deepseek_v3, yarn with two mscales": {
        **DEEPSEEK, "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.7, "mscale_all_dim": 1.4},
    },
    "deepseek_v3, no latent of queries": {**DEEPSEEK, "q_lora_rank": None},
    "deepseek_v3, latents larger than they pay": {**DEEPSEEK, "kv_lora_rank": 11},
    "deepseek_v3, wide values": {**DEEPSEEK, "v_head_dim": 24, "kv_lora_rank": 20},
    "deepseek_v3, halves rotated": {**DEEPSEEK, "rope_interleave": False},
    "deepseek_v3, one group": {**DEEPSEEK, "n_group": 1, "topk_group": 1},
    "deepseek_v3, all layers with experts": {**DEEPSEEK, "first_k_dense_replace": 0},
    "deepseek_v3, weights as they are": {**DEEPSEEK, "norm_topk_prob": False},
    "deepseek_v32": SPARSE,
    "deepseek_v32, as deepseek_v3": {**SPARSE, "model_type": "deepseek_v3"},
    "deepseek_v32, all entries seen": {**SPARSE, "index_topk": 60},
    "deepseek_v32, unfolded": {**SPARSE, "kv_lora_rank": 11},
    "deepseek_v32, yarn": {**SPARSE, "rope_scaling": DEEPSEEK_YARN},
    "glm_moe_dsa": {**SPARSE, "model_type": "glm_moe_dsa"},
    "glm_moe_dsa, shared indexers": {
        **SPARSE, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "shared"],
    },
    "glm_moe_dsa, every second indexer": {
        **SPARSE, "model_type": "glm_moe_dsa", "index_topk_freq": 2, "index_skip_topk_offset": 1,
    },
    "mimo_v2_flash": MIMO_V2,
    "mimo_v2_flash, values as they are": {**MIMO_V2, "attention_value_scale": None},
    "mimo_v2_flash, groups and scale": {
        **MIMO_V2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
    },
    "mellum": MELLUM,
    "mellum, a dense layer, angles by kind": {
        **MELLUM, "mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "mellum, no layer slides": {**MELLUM, "layer_types": None},
    "mellum, weights as they are": {**MELLUM, "norm_topk_prob": False},
    "glm4_moe_lite": {**DEEPSEEK, "model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1},
}  # fmt: skip
LENGTH = 40


def text(length: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, SMALL["vocab_size"], (length,), generator=draw).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits_equal_those_of_transformers_in_one_pass_in_chunks_and_in_a_batch(
    changes: dict[str, Any],
) -> None:
    raw = {**SMALL, **changes}
    theirs = transformers_model(raw)
    trunk = our_trunk(raw, theirs, torch.float32)
    ids, other = text(LENGTH), text(LENGTH - 11, seed=1)
    expected, expected_other = (theirs(torch.tensor([t])).logits[0] for t in (ids, other))

    whole = PagedRun(trunk, 1, block_size=16).step({0: ids})[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)

    # chunks of a prompt beside single tokens, then rounds of decoding with several rows
    steps = ((7, 1), (1, 13), (12, 0), (5, 4), (1, 1), (1, 1), (4, 3), (9, 6))
    found = in_steps(PagedRun(trunk, 2, block_size=3), (ids, other), steps)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], expected_other, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(
    "dropped",
    ["linear rope", "llama3 rope", "yarn", "yarn with attention factor", "yarn with betas",
     "yarn without truncation"],
)  # fmt: skip
def test_an_ignored_rope_option_would_show(dropped: str) -> None:
    """The control of the comparison: the same weights with plain rotary positions differ."""
    raw = {**SMALL, **CASES[f"llama, {dropped}"]}
    theirs = transformers_model(raw)
    scaling = raw["rope_scaling"]
    details = {"attention_factor", "beta_fast", "beta_slow", "truncate"} & set(scaling)
    plain = {n: v for n, v in scaling.items() if n not in details} if details else {}
    trunk = our_trunk({**raw, "rope_scaling": plain}, theirs, torch.float32)
    ids = text(LENGTH)
    ours = PagedRun(trunk, 1, block_size=16).step({0: ids})[0]
    assert (ours - theirs(torch.tensor([ids])).logits[0]).abs().max() > 1e-2


@torch.inference_mode()
def test_an_ignored_window_would_show() -> None:
    raw = {**SMALL, **CASES["qwen2, windows above layer 1"]}
    theirs = transformers_model(raw)
    trunk = our_trunk({**raw, "use_sliding_window": False}, theirs, torch.float32)
    ids = text(LENGTH)
    ours = PagedRun(trunk, 1, block_size=16).step({0: ids})[0]
    assert (ours - theirs(torch.tensor([ids])).logits[0]).abs().max() > 1e-2


@torch.inference_mode()
@pytest.mark.parametrize(
    "change",
    [{"sliding_window_size": 6}, {"swa_rope_theta": 5e6}, {"attention_value_scale": 1.0},
     {"partial_rotary_factor": 0.5}],
    ids=str,
)  # fmt: skip
def test_an_ignored_option_of_sliding_layers_would_show(change: dict[str, Any]) -> None:
    raw = {**SMALL, **MIMO_V2}
    theirs = transformers_model(raw)
    trunk = our_trunk({**raw, **change}, theirs, torch.float32)
    ids = text(LENGTH)
    ours = PagedRun(trunk, 1, block_size=16).step({0: ids})[0]
    assert (ours - theirs(torch.tensor([ids])).logits[0]).abs().max() > 1e-3


@torch.inference_mode()
def test_ignored_sinks_would_show() -> None:
    raw = {**SMALL, **MIMO_V2}
    theirs = transformers_model(raw)
    trunk = our_trunk(raw, theirs, torch.float32)
    trunk.layers[1].attention.sinks = None
    ids = text(LENGTH)
    ours = PagedRun(trunk, 1, block_size=16).step({0: ids})[0]
    assert (ours - theirs(torch.tensor([ids])).logits[0]).abs().max() > 1e-2


IGNORED: dict[str, tuple[str, dict[str, Any]]] = {
    "groups": ("glm4_moe, groups", {"n_group": 1, "topk_group": 1}),
    "renormalisation": ("glm4_moe", {"norm_topk_prob": False}),
    "the scale": ("glm4_moe", {"routed_scaling_factor": 1.0}),
    "another share rotated": ("glm4_moe, a quarter rotated", {"partial_rotary_factor": 0.5}),
    "scores by softmax": ("glm4_moe", {"scoring_func": "softmax"}),
    "weights as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "one expert fewer": ("ernie4_5_moe", {"moe_k": 2}),
    "more entries seen": ("deepseek_v32", {"index_topk": 8}),
    "neighbours rotated in the indexer": ("deepseek_v32", {"indexer_rope_interleave": True}),
    "halves rotated in the indexer": ("glm_moe_dsa", {"indexer_rope_interleave": False}),
    "a wider window": ("mellum", {"sliding_window": 6}),
    "one angle for all": ("mellum", {"rope_parameters": {
        kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
    }}),
    "groups of DeepSeek": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize(("case", "change"), IGNORED.values(), ids=IGNORED)
def test_an_ignored_option_of_routing_would_show(case: str, change: dict[str, Any]) -> None:
    raw = {**SMALL, **CASES[case]}
    theirs = transformers_model(raw)
    trunk = our_trunk({**raw, **change}, theirs, torch.float32)
    ids = text(LENGTH)
    ours = PagedRun(trunk, 1, block_size=16).step({0: ids})[0]
    assert (ours - theirs(torch.tensor([ids])).logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_config_as_transformers_writes_it_today_means_the_same(changes: dict[str, Any]) -> None:
    """Older configs say rope_theta and rope_scaling, newer ones rope_parameters."""
    raw = {**SMALL, **changes}
    today = {**transformers_model(raw).config.to_dict(), "model_type": raw["model_type"]}
    assert model_config(today) == model_config(raw)


def test_rotary_tables_in_fp64_do_not_lose_digits_at_far_positions() -> None:
    config = rope_config({"rope_theta": 1e6}, 64)
    near, far = (RotaryTable(config, 5000, d) for d in (torch.float32, torch.float64))
    assert far.cos.dtype == torch.float64
    assert 0 < (near.cos.double() - far.cos).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_a_rope_kind_that_depends_on_the_length_is_refused(kind: str) -> None:
    raw = {**SMALL, "model_type": "llama", "rope_scaling": {"type": kind, "factor": 2.0}}
    with pytest.raises(UnsupportedFamily, match=f"rope type '{kind}' is not supported"):
        model_config(raw)


def test_partial_rotation_is_refused() -> None:
    raw = {**SMALL, "model_type": "llama", "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedFamily, match=r"partial_rotary_factor is 0\.5"):
        model_config(raw)


def test_biases_everywhere_are_refused() -> None:
    with pytest.raises(UnsupportedFamily, match="use_bias is true"):
        model_config({**SMALL, **ERNIE, "use_bias": True})


@pytest.mark.parametrize(
    ("change", "why"),
    [({"layer_types": ["full_attention"]}, "layer_types has 1 entries; expected one for each of 3"),
     ({"mtp_layer_types": ["chunked_attention"]}, "holds chunked_attention"),
     ({"sliding_window": 0}, "sliding_window is 0; expected a whole number above 0"),
     ({"rope_parameters": {"full_attention": {}}}, "no entry for sliding_attention")],
)  # fmt: skip
def test_what_mellum_asks_for_and_is_not_computed_is_refused(
    change: dict[str, Any], why: str
) -> None:
    with pytest.raises((BadConfig, UnsupportedFamily), match=why):
        model_config({**SMALL, **MELLUM, **change})


def test_a_window_of_qwen3_moe_is_refused() -> None:
    with pytest.raises(UnsupportedFamily, match=r"use_sliding_window is true; .* without windows"):
        model_config({**SMALL, **QWEN3_MOE, **WINDOWS})


def test_another_activation_is_refused() -> None:
    with pytest.raises(UnsupportedFamily, match="hidden_act is 'gelu'"):
        model_config({**SMALL, "model_type": "llama", "hidden_act": "gelu"})


def test_a_family_that_the_engine_does_not_run_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFamily, match="does not run model_type 'hy_v3'; it runs llama"):
        model_config({**SMALL, "model_type": "hy_v3"})


def test_random_weights_reach_every_parameter() -> None:
    model = randomised(transformers_model({**SMALL, **CASES["llama, biases"]}))
    assert all(parameter.std() > 0 for parameter in model.parameters())
