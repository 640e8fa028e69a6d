"""Hybrid trunks against transformers: delta nets, gated attention, experts, in every spelling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_reference import (
    SMALL,
    PagedRun,
    in_steps,
    our_trunk,
    published,
    transformers_model,
)

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.models.config_reader import model_config
from headstart.models.norm import Norm

FULL, LINEAR = "full_attention", "linear_attention"
HYBRID: dict[str, Any] = {
    **SMALL, "num_hidden_layers": 4, "head_dim": 16, "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}  # fmt: skip
NEXT = {**HYBRID, **EXPERTS, "model_type": "qwen3_next"}
DENSE = {**HYBRID, "model_type": "qwen3_5_text"}
MOE = {**HYBRID, **EXPERTS, "model_type": "qwen3_5_moe_text"}
CASES: dict[str, dict[str, Any]] = {
    "next": NEXT,
    "next, dense": {**NEXT, "mlp_only_layers": [0, 1, 2, 3]},
    "next, experts in every other layer": {**NEXT, "decoder_sparse_step": 2},
    "next, weights as they are": {**NEXT, "norm_topk_prob": False},
    "next, all layers recurrent": {**NEXT, "layer_types": [LINEAR] * 4},
    "next, all layers attend": {**NEXT, "layer_types": [FULL] * 4},
    "next, attention first": {**NEXT, "layer_types": [FULL, LINEAR] * 2},
    "next, every second attends": {**NEXT, "full_attention_interval": 2},
    "next, a value head per key head": {**NEXT, "linear_num_value_heads": 2},
    "next, short convolution": {**NEXT, "linear_conv_kernel_dim": 2},
    "next, biases": {**NEXT, "attention_bias": True},
    "next, half rotated": {**NEXT, "partial_rotary_factor": 0.5},
    "next, tied": {**NEXT, "tie_word_embeddings": True},
    "3.5": DENSE,
    "3.5, tied": {**DENSE, "tie_word_embeddings": True},
    "3.5, wide values": {**DENSE, "linear_value_head_dim": 24, "linear_num_value_heads": 6},
    "3.5, experts": {name: v for name, v in MOE.items() if name != "intermediate_size"},
}
LENGTH = 40


def published_model(raw: dict[str, Any]) -> Any:
    """Random weights; those of zero-centred norms around 0, where they belong."""
    model = transformers_model(raw)
    for name, parameter in model.named_parameters():
        if "norm" in name and "linear_attn" not in name:
            parameter -= 1
    model.lm_head.weight *= 0.4  # fp32 rounds in proportion, in both implementations
    return model


def text(length: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, SMALL["vocab_size"], (length,), generator=draw).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("raw", CASES.values(), ids=CASES)
def test_logits_equal_those_of_transformers_in_one_pass_in_chunks_and_in_a_batch(
    raw: dict[str, Any],
) -> None:
    theirs = published_model(raw)
    trunk = our_trunk(raw, theirs, torch.float32)
    ids, other = text(LENGTH), text(LENGTH - 11, seed=1)
    expected, expected_other = (
        theirs(torch.tensor([t]), use_cache=False).logits[0] for t in (ids, other)
    )

    whole = PagedRun(trunk, 1, block_size=16).step({0: ids})[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)

    # chunks of a prompt beside single tokens, then rounds of decoding with several rows
    steps = ((26, 1), (1, 13), (1, 0), (1, 5), (1, 1), (1, 1), (4, 3), (5, 5))
    found = in_steps(PagedRun(trunk, 2, block_size=3), (ids, other), steps)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], expected_other, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("mistake", ["plain norms", "gate forgotten", "rows as they are stored"])
def test_a_mistake_would_show(mistake: str) -> None:
    theirs = published_model(NEXT)
    trunk = our_trunk(NEXT, theirs, torch.float32)
    for module in trunk.modules():
        if mistake == "plain norms" and isinstance(module, Norm):
            module.centred = False
    if mistake == "gate forgotten":
        trunk.layers[3].attention.o.weight *= 2  # as if every gate were open half
        trunk.layers[3].attention.qkv.weight.view(4, 2, 16, -1)[:2, 1].zero_()
    if mistake == "rows as they are stored":
        stored = published(theirs, trunk.config)["model.layers.0.linear_attn.in_proj_qkvz.weight"]
        trunk.layers[0].attention.inputs.weight[: len(stored)] = stored
    ids = text(LENGTH)
    ours = PagedRun(trunk, 1, block_size=16).step({0: ids})[0]
    assert (ours - theirs(torch.tensor([ids])).logits[0]).abs().max() > 1e-2


def test_a_nested_config_of_today_means_the_same() -> None:
    """Qwen3.5's text part, alone and as transformers writes it."""
    today = {**transformers_model(DENSE).config.to_dict(), "model_type": "qwen3_5_text"}
    assert model_config(today) == model_config(DENSE)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"layer_types": [LINEAR] * 3}, BadConfig, "layer_types has 3 entries; expected one"),
        ({"layer_types": ["mamba"] * 4}, UnsupportedFamily, "layer_types holds mamba; the engine"),
        ({"linear_num_value_heads": 3}, BadConfig, "as many value heads as key heads or a multip"),
        ({"linear_key_head_dim": "12"}, BadConfig, "linear_key_head_dim, .* are 2, 4, '12', 10"),
        ({"attn_output_gate": False}, UnsupportedFamily, "attn_output_gate is false"),
    ],
    ids=["short list", "unknown kind", "uneven heads", "no number", "no gate"],
)
def test_what_cannot_be_meant_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        model_config({**NEXT, **changes})
