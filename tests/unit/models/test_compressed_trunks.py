"""DeepSeek-V4's trunk against transformers: near tokens, windows of tokens, a choice of windows,
experts by token; whole, in chunks and in a batch, and what a forgotten part changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_reference import SMALL, PagedRun, in_steps, randomised, sources
from torch import Tensor

from headstart.errors import BadConfig, ShapeMismatch, UnsupportedFamily
from headstart.models.config_reader import model_config
from headstart.models.loading import TrunkNames, load_trunk
from headstart.models.trunk import Trunk

NEAR, CHOSEN, ALL = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
V4: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name != "intermediate_size"},
    "model_type": "deepseek_v4", "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 12,
    "q_lora_rank": 20, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 1, "routed_scaling_factor": 1.7, "scoring_func": "sqrtsoftplus",
    "layer_types": [NEAR, CHOSEN, ALL, CHOSEN],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "compress_rates": {CHOSEN: 4, ALL: 6}, "partial_rotary_factor": 0.5, "sliding_window": 7,
    "o_groups": 2, "o_lora_rank": 10, "index_n_heads": 8, "index_head_dim": 8, "index_topk": 3,
    "hc_mult": 3, "hc_sinkhorn_iters": 3, "swiglu_limit": 0.4,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
RELEASED: dict[str, Any] = {
    **{name: value for name, value in V4.items() if name not in (
        "layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor",
        "rope_parameters",
    )},
    "compress_ratios": [0, 4, 128, 4], "num_hash_layers": 2, "qk_rope_head_dim": 6,
    "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32,
        "beta_slow": 1,
    },
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as transformers writes it": V4,
    "as releases write it": RELEASED,
    "all windows seen": {**V4, "index_topk": 60},
    "one window seen": {**V4, "index_topk": 1},
    "other sizes, plain positions": {
        **V4, "compress_rates": {CHOSEN: 3, ALL: 2}, "sliding_window": 1, "rope_parameters": None,
    },
    "experts by token everywhere, one group": {
        **V4, "mlp_layer_types": ["hash_moe"] * 4, "o_groups": 1, "swiglu_limit": 10.0,
    },
}  # fmt: skip
# their names -> the releases', the longer ones first
_NAMES = {
    "model.embed_tokens.": "embed.", "lm_head.": "head.", "model.hc_head.hc_": "hc_head_",
    "model.norm.": "norm.", "model.layers.": "layers.",
    "self_attn.compressor.indexer.scorer.": "attn.indexer.",
    "self_attn.compressor.indexer.q_b_proj.": "attn.indexer.wq_b.",
    "self_attn.compressor.indexer.": "attn.indexer.compressor.",
    "compressor.kv_norm.": "compressor.norm.", ".position_bias": ".ape",
    "self_attn.": "attn.", "mlp.": "ffn.", ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.", ".attn_hc.": ".hc_attn_", ".ffn_hc.": ".hc_ffn_",
    ".sinks": ".attn_sink", ".q_a_proj.": ".wq_a.", "attn.q_b_proj.": "attn.wq_b.",
    ".kv_proj.": ".wkv.", "compressor.gate_proj.": "compressor.wgate.", ".o_a_proj.": ".wo_a.",
    ".o_b_proj.": ".wo_b.", ".q_a_norm.": ".q_norm.", ".e_score_correction_bias": ".bias",
    "shared_experts.gate_proj.": "shared_experts.w1.",
    "shared_experts.down_proj.": "shared_experts.w2.",
    "shared_experts.up_proj.": "shared_experts.w3.",
}  # fmt: skip
NAMES = TrunkNames("embed.weight", "norm.weight", "head.weight", "layers.{layer}.", "")


def their_model(raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in raw.items() if name != "model_type"}
    config = AutoConfig.for_model("deepseek_v4", **fields)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomised(model)
    draw = torch.Generator().manual_seed(5)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            orders = torch.rand(len(table), raw["n_routed_experts"], generator=draw).argsort(1)
            table.copy_(orders[:, : table.shape[1]])
    return model


def published(model: Any) -> dict[str, Tensor]:
    """Weights as a release stores them."""
    result: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(value):
                result[f"{stem}{expert}.w1.weight"], result[f"{stem}{expert}.w3.weight"] = (
                    both.chunk(2)
                )
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            result |= {f"{stem}{expert}.w2.weight": own for expert, own in enumerate(value)}
        else:
            result[name] = value
    return result


def our_trunk(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Trunk:
    config = model_config(raw)
    trunk = Trunk(config, config.max_positions, torch.float32)
    load_trunk(trunk, sources(tensors), NAMES)
    return trunk


def text(length: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, SMALL["vocab_size"], (length,), generator=draw).tolist()


IDS, OTHER = text(40), text(29, seed=1)


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_whole_in_chunks_and_in_a_batch(case: str) -> None:
    raw = CASES[case]
    model = their_model(raw)
    expected = [model(torch.tensor([ids])).logits[0] for ids in (IDS, OTHER)]
    trunk = our_trunk(raw, published(model))
    whole = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    torch.testing.assert_close(whole, expected[0], atol=2e-4, rtol=2e-4)
    steps = ((7, 1), (1, 13), (12, 0), (5, 4), (1, 1), (1, 1), (4, 3), (9, 6))
    found = in_steps(PagedRun(trunk, 2, block_size=3), (IDS, OTHER), steps)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


IGNORED: dict[str, dict[str, Any]] = {
    "the near tokens": {"sliding_window": 8},
    "another choice": {"index_topk": 4},
    "the theta of near layers": {"rope_theta": 5000.0},
    "the theta of far layers": {"compress_rope_theta": 5000.0},
    "stretched positions": {"rope_parameters": None},
    "the limit": {"swiglu_limit": 0.5},
    "the balance": {"hc_sinkhorn_iters": 1},
    "the scores": {"scoring_func": "sigmoid"},
    "the rotated part": {"partial_rotary_factor": 1 / 3},
}


@torch.inference_mode()
@pytest.mark.parametrize("part", IGNORED)
def test_every_part_of_the_config_shows(part: str) -> None:
    model = their_model(V4)
    tensors = published(model)
    right, wrong = (our_trunk({**V4, **own}, tensors) for own in ({}, IGNORED[part]))
    one, other = (PagedRun(t, 1, block_size=16).step({0: IDS})[0] for t in (right, wrong))
    assert (one - other).abs().max() > 1e-3


def test_rows_are_cut_where_their_scores_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.models import compressed_attention

    model = their_model(V4)
    trunk = our_trunk(V4, published(model))
    whole = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    monkeypatch.setattr(compressed_attention, "_SCORES", 1 << 9)
    assert trunk.layers[1].attention._rows_at_once(10) < 4
    cut = PagedRun(trunk, 1, block_size=16).step({0: IDS})[0]
    torch.testing.assert_close(whole, cut, atol=1e-5, rtol=1e-5)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "windows of 8": ({**RELEASED, "compress_ratios": [0, 8, 4, 4]}, UnsupportedFamily, "see 8"),
    "a size of 0": ({**V4, "compress_rates": {ALL: 0}}, BadConfig, "sizes above 0"),
    "groups that heads do not fill": ({**V4, "o_groups": 3}, BadConfig, "share evenly"),
    "an odd rotated size": ({**RELEASED, "qk_rope_head_dim": 5}, BadConfig, "even rotated size"),
    "index heads too small": ({**V4, "index_head_dim": 4}, BadConfig, "at least the rotated"),
    "no near tokens": ({**V4, "sliding_window": 0}, BadConfig, "sliding_window 0"),
    "other scores": ({**V4, "scoring_func": "tanh"}, UnsupportedFamily, "'tanh'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_computed_is_refused_by_name(case: str) -> None:
    raw, kind, words = WRONG[case]
    with pytest.raises(kind, match=words):
        model_config(raw)


def test_a_table_that_names_no_expert_is_refused() -> None:
    tensors = published(their_model(V4))
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"] + 6
    with pytest.raises(ShapeMismatch, match="has 8 experts"):
        our_trunk(V4, tensors)
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].float()
    with pytest.raises(UnsupportedFamily, match="expected I64, I32"):
        our_trunk(V4, tensors)
