"""Kimi-K3: an appended layer that receives and hands on states before the final norm."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk
from headstart.families.blocks import ROLES
from headstart.families.keymaps import appended_layer

K3 = Family(
    name="kimi_k3",
    title="Kimi-K3",
    model_types=("kimi_k3",),
    architectures=("KimiK3ForConditionalGeneration",),
    keys=appended_layer(roots=("language_model.", "")),
    layout=HeadLayout(
        trunk_hidden="before_final_norm",
        recycled_hidden="before_out_norm",
        deviations={"vllm": {"zero_embed_at_position_0": True}},
    ),
    head=ROLES,
    # No block table: gated MLA without positions plus latent MoE, experts packed as MXFP4.
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(
        prefixes=("language_model.model.", "model."),
        lm_heads=("language_model.lm_head.weight", "lm_head.weight"),
    ),
    kv_elements="kv_rank+rope_dim",
    looked_up_as={"vllm": "model.layers.{layer}."},
    served={"vllm": "0.27.0"},
    is_published=False,
    lacks="its linear attention, and latent attention without positions",
    notes=(
        "self_attention_res_* and mlp_res_* tensors in the head are not used by vLLM",
        "experts are w1, w2, w3 with .weight_packed and .weight_scale",
        "no release has a head: vLLM has code for one, and the drafts in use are DSpark models",
        "served by vLLM only",
    ),
)
