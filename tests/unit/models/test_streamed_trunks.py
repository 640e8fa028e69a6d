"""Trunks with several residual streams against transformers, and what a forgotten part changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_reference import SMALL, PagedRun, in_steps, randomised, sources
from torch import Tensor, nn

from headstart.errors import BadConfig, ShapeMismatch, UnsupportedFamily
from headstart.families.base import expand
from headstart.families.registry import match_family
from headstart.models.config_reader import model_config
from headstart.models.loading import load_trunk
from headstart.models.trunk import Trunk

LATENT: dict[str, Any] = {
    **SMALL, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_nope_head_dim": 10, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "routed_scaling_factor": 1.7,
    "index_n_heads": 8, "index_head_dim": 14, "index_topk": 8, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 1, "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
HY_V4: dict[str, Any] = {
    **LATENT, "model_type": "hy_v4", "qk_rope_head_dim": 6, "head_dim": 6, "hc_mult": 3,
    "indexer_types": ["full", "shared", "full"], "swiglu_limit": 0.4,
}  # fmt: skip
GLM5_NEXT: dict[str, Any] = {
    **LATENT, "model_type": "glm5_next_text", "qk_rope_head_dim": 0, "head_dim": 0, "hc_mult": 3,
    "layer_types": ["indexed_attention", "linear_attention", "indexed_attention"],
    "swiglu_limit": 0.4, "index_kpool": 4, "linear_num_heads": 3, "linear_head_dim": 6,
    "linear_conv_kernel_dim": 4, "hc_sinkhorn_iters": 3, "index_n_heads": 16,
}  # fmt: skip
QWEN4_EXP: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name != "rope_theta"},
    "model_type": "qwen4_exp_text", "head_dim": 16, "hc_count": 3, "hc_lowrank": 5,
    "layer_types": ["full_attention", "linear_attention", "indexed_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
    },
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4, "indexer_n_heads": 12,
    "indexer_kv_heads": 1, "indexer_head_dim": 10, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
NGRAMS: dict[str, Any] = {
    **QWEN4_EXP, "ple_layer_ids": [2], "ple_embed_dim": 12, "ngram_vocab_size_base": 40,
    "heads_per_ngram": 2, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4,
    "eos_token_id": [9, 1],
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "hy_v4": HY_V4,
    "hy_v4, unfolded": {**HY_V4, "kv_lora_rank": 11},
    "hy_v4, all entries seen": {**HY_V4, "index_topk": 60},
    "hy_v4, another magnitude": {**HY_V4, "hc_magnitude": 1.3, "hc_eps": 1e-3},
    "hy_v4, as vLLM names layers": {**HY_V4, "layer_types": ["sparse_attention"] * 3},
    "glm5_next": GLM5_NEXT,
    "glm5_next, unfolded": {**GLM5_NEXT, "kv_lora_rank": 11},
    "glm5_next, all entries seen": {**GLM5_NEXT, "index_topk": 60},
    "glm5_next, pools of three, another balance": {
        **GLM5_NEXT,
        "index_kpool": 3,
        "index_topk": 9,
        "hc_sinkhorn_iters": 1,
        "hc_eps": 1e-3,
    },
    "glm5_next, decays without a bound": {**GLM5_NEXT, "linear_lower_bound": None},
    "qwen4_exp": QWEN4_EXP,
    "qwen4_exp, an embedding of several tokens": NGRAMS,
    "qwen4_exp, n-grams of four": {
        **NGRAMS,
        "ngram_size": 4,
        "heads_per_ngram": 1,
        "ple_embed_dim": 9,
        "ple_conv_kernel_size": 3,
        "eos_token_id": 7,
    },
    "qwen4_exp, all entries seen": {**QWEN4_EXP, "indexer_budget": 60},
    "qwen4_exp, a gate by sigmoid, pools of three": {
        **QWEN4_EXP,
        "output_gate_type": "sigmoid",
        "indexer_compress_ratio": 3,
        "indexer_budget": 9,
    },
}


class WithHead(nn.Module):
    """A text model of theirs that has no class with an LM head."""

    def __init__(self, model: nn.Module, raw: dict[str, Any]):
        super().__init__()
        self.model = model
        self.lm_head = nn.Linear(raw["hidden_size"], raw["vocab_size"], bias=False)


def their_model(raw: dict[str, Any]) -> Any:
    """Their trunk with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

    dropped = ("model_type", *(["layer_types"] if raw["model_type"] == "hy_v4" else []))
    fields = {name: value for name, value in raw.items() if name not in dropped}
    config = AutoConfig.for_model(raw["model_type"], **fields)
    config._attn_implementation = "eager"
    if raw["model_type"] == "glm5_next_text":
        return randomised(WithHead(Glm5NextTextModel(config), raw).eval())
    return randomised(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())


def their_logits(model: Any, ids: list[int]) -> Tensor:
    states = model.model(torch.tensor([ids])).last_hidden_state[0]
    found = states.float() @ model.lm_head.weight.T
    assert isinstance(found, Tensor)
    return found


_HY_V4 = {
    "self_attn.gate_proj": "self_attn.linear_gate", "self_attn.sinks": "self_attn."
    "learnable_sink_param", "attn_hc.": "hc_attn_layer.hc_pre.hc_",
    "ffn_hc.": "hc_mlp_layer.hc_pre.hc_", "hc_head.hc_": "hc_head.hc_head_",
}  # fmt: skip


def _neighbours(value: Tensor, heads: int, first: int, size: int) -> Tensor:
    """Rows of each head with the pairs that lie half of `size` apart brought side by side."""
    rows = value.clone().unflatten(0, (heads, -1))
    half = size // 2
    order = [first + place for pair in range(half) for place in (pair, pair + half)]
    rows[:, first : first + size] = rows[:, order]
    return rows.flatten(0, 1)


def published_hy_v4(model: Any, raw: dict[str, Any]) -> dict[str, Tensor]:
    """Weights as a release stores them: other names, and neighbours where transformers has halves.

    Both rotate the same pairs then, so that numbers must agree.
    """
    heads, nope, rope = raw["num_attention_heads"], raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    index, last = raw["index_n_heads"], raw["index_head_dim"] - rope
    result = {}
    for name, value in model.state_dict().items():
        if name.endswith("self_attn.q_b_proj.weight"):
            value = _neighbours(value, heads, nope, rope)
        elif name.endswith("kv_a_proj_with_mqa.weight"):
            value = _neighbours(value, 1, raw["kv_lora_rank"], rope)
        elif name.endswith("indexer.wq_b.weight"):
            value = _neighbours(value, index, last, rope)
        elif ".indexer.wk" in name or ".indexer.k_norm" in name:
            value = _neighbours(value, 1, last, rope)
        for theirs, ours in _HY_V4.items():
            name = name.replace(theirs, ours)
        result[name] = value
    return result


_GLM5_NEXT = {
    "self_attn.forget_gate.": "self_attn.", "attn_hc.": "hc_attn_", "ffn_hc.": "hc_ffn_",
}  # fmt: skip


def published_glm5_next(model: Any) -> dict[str, Tensor]:
    """The same; convolutions of q, k and v are stored apart."""
    result = {}
    for name, value in model.state_dict().items():
        for theirs, ours in _GLM5_NEXT.items():
            name = name.replace(theirs, ours)
        if name.endswith("self_attn.conv1d.weight"):
            at = name.removesuffix("conv1d.weight")
            parts = zip("qkv", value.chunk(3), strict=True)
            result |= {f"{at}{part}_conv1d.weight": own for part, own in parts}
        else:
            result[name] = value
    return result


def our_trunk(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Trunk:
    trunk = Trunk(model_config(raw), SMALL["max_position_embeddings"], torch.float32)
    load_trunk(trunk, sources(tensors))
    return trunk


def both(case: str) -> tuple[dict[str, Any], Any, dict[str, Tensor]]:
    raw = CASES[case]
    model = their_model(raw)
    if raw["model_type"] == "hy_v4":
        return raw, model, published_hy_v4(model, raw)
    if raw["model_type"] == "glm5_next_text":
        return raw, model, published_glm5_next(model)
    return raw, model, published_qwen4_exp(model)


def published_qwen4_exp(model: Any) -> dict[str, Tensor]:
    """Tables are stored in parts."""
    result = {}
    for name, value in model.state_dict().items():
        if name.endswith("ngram_embedding.weight"):
            at = name.removesuffix("weight")
            parts = enumerate(value.chunk(4))
            result |= {f"{at}shard_{number}.weight": own for number, own in parts}
        else:
            result[name] = value
    return result


def text(length: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, SMALL["vocab_size"], (length,), generator=draw).tolist()


IDS, OTHER = text(40), text(29, seed=1)
IDS[11], IDS[19], IDS[20], OTHER[8] = 9, 9, 7, 7  # ends of text, in models that know them


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_whole_in_chunks_and_in_a_batch(case: str) -> None:
    raw, model, tensors = both(case)
    expected = [their_logits(model, ids) for ids in (IDS, OTHER)]
    trunk = our_trunk(raw, tensors)
    whole = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    torch.testing.assert_close(whole, expected[0], atol=2e-4, rtol=2e-4)
    steps = ((7, 1), (1, 13), (12, 0), (5, 4), (1, 1), (1, 1), (4, 3), (9, 6))
    found = in_steps(PagedRun(trunk, 2, block_size=3), (IDS, OTHER), steps)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


IGNORED: dict[str, tuple[str, dict[str, Any]]] = {
    "the magnitude": ("hy_v4", {"hc_magnitude": 1.5}),
    "the limit": ("hy_v4", {"swiglu_limit": 0.0}),
    "the limit before the activation": ("hy_v4", {"limits_before_activation": False}),
    "the balance": ("glm5_next", {"hc_sinkhorn_iters": 1}),
    "the limit of all": ("glm5_next", {"swiglu_limit": 10.0}),
    "another pool": ("glm5_next", {"index_topk": 12}),
    "the bound of decays": ("glm5_next", {"linear_lower_bound": -1.0}),
    "the gate's activation": ("qwen4_exp", {"output_gate_type": "sigmoid"}),
    "the end of text": ("qwen4_exp, an embedding of several tokens", {"eos_token_id": 1}),
    "a larger budget": ("qwen4_exp", {"indexer_budget": 12}),
    "another choice": ("hy_v4", {"index_topk": 7}),
}


@torch.inference_mode()
@pytest.mark.parametrize(("case", "change"), IGNORED.values(), ids=IGNORED)
def test_an_ignored_option_would_show(
    case: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, model, tensors = both(case)
    from headstart.families.registry import runtimes

    fixed = runtimes()[raw["model_type"]].fixed
    for name in fixed.keys() & change.keys():
        monkeypatch.setitem(fixed, name, change[name])
    found = PagedRun(our_trunk({**raw, **change}, tensors), 1, block_size=16).step({0: IDS})[0]
    assert (found - their_logits(model, IDS)).abs().max() > 1e-2


@torch.inference_mode()
@pytest.mark.parametrize("part", ["sinks", "gate"])
def test_an_ignored_part_of_latent_attention_would_show(part: str) -> None:
    raw, model, tensors = both("hy_v4")
    trunk = our_trunk(raw, tensors)
    for layer in trunk.layers:
        setattr(layer.attention, part, None)
    found = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    assert (found - their_logits(model, IDS)).abs().max() > 1e-2


@torch.inference_mode()
def test_weights_with_halves_would_show() -> None:
    """The control of the permutation: transformers' own weights mean something else here."""
    raw, model, tensors = both("hy_v4")
    for name in tensors:
        if name.endswith("q_b_proj.weight"):
            tensors[name] = model.state_dict()[name]
    found = PagedRun(our_trunk(raw, tensors), 1, block_size=16).step({0: IDS})[0]
    assert (found - their_logits(model, IDS)).abs().max() > 1e-2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a layer of another kind": (
        {**HY_V4, "layer_types": ["sparse_attention", "full_attention", "sparse"]},
        "layer_types holds full_attention",
    ),
    "sharing unsaid": ({**HY_V4, "indexer_types": None}, "which layers share an indexer"),
    "no gate": ({**HY_V4, "gated_mla": False}, "gated_mla is false"),
    "gates by head": ({**HY_V4, "gating_type": "headwise"}, "gating_type is 'headwise'"),
    "shared indexers": ({**GLM5_NEXT, "indexer_types": ["full", "full", "shared"]}, "share an ind"),
    "no tail": ({**GLM5_NEXT, "index_kpool_always_select_tail": False}, "behind the last pool"),
    "an odd pool": ({**GLM5_NEXT, "index_kpool": 3}, "index_kpool is 3 and index_topk 8"),
    "positions": ({**GLM5_NEXT, "qk_rope_head_dim": 4}, "without positions in attention"),
    "two embeddings": ({**NGRAMS, "ple_layer_ids": [1, 2]}, "in recurrent layers only"),
    "no end of text": ({**NGRAMS, "eos_token_id": None}, "and an end of text"),
    "two key heads": ({**QWEN4_EXP, "indexer_kv_heads": 2}, "and 1 key head"),
    "an odd budget": ({**QWEN4_EXP, "indexer_budget": 9}, "a budget that is a multiple"),
    "another gate": ({**QWEN4_EXP, "output_gate_type": "tanh"}, "output_gate_type is 'tanh'"),
    "no rank": ({**QWEN4_EXP, "hc_lowrank": None}, "no rank of the streams' gates"),
    "a bound of decays above 0": ({**GLM5_NEXT, "linear_lower_bound": 0.5}, "a number below 0"),
    "a bound in its own object": (
        {
            **GLM5_NEXT,
            "linear_attn_config": {
                "num_heads": 3,
                "head_dim": 6,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": 0,
            },
        },
        "a number below 0",
    ),
    "a feed-forward part of another kind": (
        {**HY_V4, "mlp_layer_types": ["dense", "sparse", "x"]},
        "layer 2 is 'full_x' by its types.*computes full_dense, full_sparse",
    ),
    "another kind beside recurrent layers": (
        {**GLM5_NEXT, "mlp_layer_types": ["x", "sparse", "sparse"]},
        "layer 0 is 'attention_x'",
    ),
    "an odd seed": ({**NGRAMS, "seed": [1]}, r"seed and eos_token_id are .*\[1\], \[9, 1\]"),
    "thetas by layer": ({**QWEN4_EXP, "mtp": {"rope_theta": [1e4]}}, "head_rope_theta is given"),
    "no streams": ({**HY_V4, "hc_mult": 0}, "no number of residual streams"),
}


@pytest.mark.parametrize(("raw", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_is_refused(raw: dict[str, Any], why: str) -> None:
    with pytest.raises((BadConfig, UnsupportedFamily), match=why):
        model_config(raw)


NULLS = ("rms_norm_eps", "hc_eps", "hc_magnitude", "hc_sinkhorn_iters")


@pytest.mark.parametrize("raw", [HY_V4, GLM5_NEXT, QWEN4_EXP], ids=["hy_v4", "glm5", "qwen4"])
def test_a_null_is_as_good_as_nothing(raw: dict[str, Any]) -> None:
    silent = {name: value for name, value in raw.items() if name not in NULLS}
    assert model_config({**raw, **dict.fromkeys(NULLS)}) == model_config(silent)


def test_sizes_of_n_grams_that_are_null_are_those_of_a_silent_config() -> None:
    owner = match_family(NGRAMS, ("qwen4_exp",), ())
    assert owner is not None
    names = ("ngram_size", "heads_per_ngram", "ple_embed_dim")
    silent = {name: value for name, value in NGRAMS.items() if name not in names}
    kinds = owner.trunk.layer_kinds({**silent, **dict.fromkeys(names)})
    assert kinds == owner.trunk.layer_kinds(silent)
    del silent["hidden_size"]
    tables = expand(owner.trunk.layer_kinds(silent)["recurrent_with_ngrams"], silent)
    assert [shape for name, shape in tables.items() if ".shard_" in name] == [None] * 4


def test_a_table_that_cannot_be_shared_out_evenly_is_refused() -> None:
    raw, _, tensors = both("qwen4_exp, an embedding of several tokens")
    lost = next(name for name in tensors if name.endswith("shard_3.weight"))
    del tensors[lost]
    with pytest.raises(
        ShapeMismatch, match=r"shard_\*.weight is stored in 3 parts, and its \d+ row"
    ):
        our_trunk(raw, tensors)


def test_n_grams_that_are_hashed_otherwise_are_refused() -> None:
    raw, _, tensors = both("qwen4_exp, an embedding of several tokens")
    with pytest.raises(ShapeMismatch, match="layer_multipliers holds other numbers than follow"):
        our_trunk({**raw, "seed": 1235}, tensors)
