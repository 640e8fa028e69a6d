"""MiniMax-M3: sparse-attention MoE modules under `model.mtp.layers.`, zero-centred norms."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk
from headstart.families.blocks import ROLES
from headstart.families.keymaps import mtp_layers

M3 = Family(
    name="minimax_m3",
    title="MiniMax-M3",
    model_types=("minimax_m3_vl", "minimax_m3_mtp"),
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3MTP"),
    count_field="num_mtp_modules",
    keys=mtp_layers("model.mtp.layers.", block="transformer_layer.", roots=("language_model.", "")),
    layout=HeadLayout(
        zero_centred_norms=True,
        recycled_hidden="before_out_norm",
        deviations={"vllm": {"zero_embed_at_position_0": True}},
    ),
    head=ROLES,
    # No block table: the sizes of the index branch are not known for certain.
    trunk=Trunk(
        prefixes=("language_model.model.", "model."),
        lm_heads=("language_model.lm_head.weight", "lm_head.weight"),
    ),
    looked_up_as={"vllm": "model.layers.{module}."},
    served={"vllm": "0.24.0"},
    is_published=False,
    lacks="sparse attention by blocks",
    notes=(
        "no release has a head (MiniMax-AI/MiniMax-M3#13): vLLM's class serves those of others",
        "the block always has sparse attention (index_q_proj, index_k_proj) and block_sparse_moe",
        "MXFP8 scales are called weight_scale_inv",
        "standalone heads have model_type minimax_m3_mtp and no language_model. prefix",
        "served by vLLM only, which runs module 0 for every depth",
    ),
)
