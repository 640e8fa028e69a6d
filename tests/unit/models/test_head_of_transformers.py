"""Heads of glm4_moe and deepseek_v3 against transformers' own multi-token prediction, which shares
nothing with ours but the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.model_reference import SMALL, our_trunk, randomised, sources, transformers_model
from torch import Tensor

from headstart.families.registry import family
from headstart.models.documents import Documents
from headstart.models.loading import load_head
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk
from headstart.models.unroll import trunk_states, unroll

GLM: dict[str, Any] = {
    **SMALL, "model_type": "glm4_moe", "num_hidden_layers": 2, "attention_bias": True,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **SMALL, "model_type": "deepseek_v3", "num_hidden_layers": 2, "num_key_value_heads": 4,
    "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 12, "head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
    "mscale_all_dim": 1.4,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "glm4_moe": GLM,
    "glm4_moe, q/k norms": {**GLM, "use_qk_norm": True},
    "glm4_moe, groups and scale": {
        **GLM, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    },
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, yarn": {**DEEPSEEK, "rope_scaling": YARN},
    "deepseek_v3, no latent of queries": {**DEEPSEEK, "q_lora_rank": None},
}  # fmt: skip
NUM_MODULES = 2
IDS = [5, 17, 2, 44, 8, 8, 31, 60, 3, 12, 9, 27]
# transformers' names -> ours, below a module
_NAMES = {
    "enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "fuse", "post_norm": "out_norm",
    "mtp_block": "block",
}  # fmt: skip


def their_logits(raw: dict[str, Any]) -> tuple[Any, dict[str, Tensor], list[Tensor]]:
    """Their model, the weights of two modules under our names, and each module's logits."""
    from transformers.modeling_layers import MtpModel

    model = transformers_model(raw)
    drafting = MtpModel(model, NUM_MODULES)
    randomised(drafting.layers, seed=3)
    tensors = {}
    for name, value in drafting.layers.state_dict().items():
        module, role, rest = name.split(".", 2)
        tensors[f"modules.{module}.{_NAMES[role]}.{rest}"] = value
    ids = torch.tensor([IDS])
    hidden = model.model(ids).last_hidden_state
    logits = []
    for module in range(NUM_MODULES):
        # Row t of the first module sees token t + 1 and lies at position t + 1 there; t here.
        seen = slice(module + 1, None)
        hidden = drafting.forward_layer(
            module, hidden[:, : len(IDS) - module - 1], torch.arange(len(IDS))[None, seen], None,
            input_ids=ids[:, seen],
        )  # fmt: skip
        logits.append(drafting._project_to_logits(hidden)[0])
    return model, tensors, logits


def our_logits(trunk: Trunk, head: MTPHead) -> list[Tensor]:
    documents, ids = Documents((len(IDS),)), torch.tensor(IDS)
    states = trunk_states(trunk, ids, documents, "after_final_norm")
    found = unroll(head, trunk.embed[ids], trunk.rotary, states, documents, num_depths=NUM_MODULES)
    return [trunk.logits(normed[: len(IDS) - depth]) for depth, normed in enumerate(found, start=1)]


@torch.inference_mode()
@pytest.mark.parametrize("raw", CASES.values(), ids=CASES)
def test_logits_of_two_chained_modules_equal_those_of_transformers(raw: dict[str, Any]) -> None:
    model, tensors, expected = their_logits(raw)
    trunk = our_trunk(raw, model, torch.float32)
    layout = replace(family(raw["model_type"]).layout, topology="chained")
    head = MTPHead(trunk.config, layout, NUM_MODULES)
    load_head(head, sources(tensors), trunk.config)
    for ours, theirs in zip(our_logits(trunk, head), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    # Where the second module is fed another state, as in vLLM's GLM, that must show.
    head.layout = replace(layout, recycled_hidden="before_out_norm")
    for module in head.modules_:
        module.layout = head.layout
    other = our_logits(trunk, head)
    assert (other[1] - expected[1]).abs().max() > 1e-2
