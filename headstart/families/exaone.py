"""K-EXAONE (EXAONE-MoE) and EXAONE-4.5: Qwen-style names, plain norms."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import DENSE_MLP, GQA, NORMS, QK_NORM, ROLES
from headstart.families.keymaps import qwen_style

_POST_NORMS = parts("""
    post_attention_layernorm.weight     hidden
    post_feedforward_layernorm.weight   hidden
""")
_MOE_BLOCK = NORMS + GQA + QK_NORM + DENSE_MLP
_POST_NORM_BLOCK = _POST_NORMS + GQA + QK_NORM + DENSE_MLP

MOE = Family(
    name="exaone_moe",
    title="K-EXAONE-236B-A23B",
    model_types=("exaone_moe",),
    architectures=("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
    keys=qwen_style(),
    layout=HeadLayout(),
    head=ROLES,
    # A MoE head is conceivable; both engines build the dense one, so only that can be in use.
    block=lambda fields: _MOE_BLOCK,
    looked_up_as={"vllm": "mtp.layers.{module}."},
    served={"vllm": "0.14.0", "sglang": "0.5.9", "trtllm": "1.3.0rc2"},
    notes=("attention type and window come from mtp_layer_types and mtp_sliding_windows",),
)

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")

EXAONE4_5 = Family(
    name="exaone4_5",
    title="EXAONE-4.5-33B",
    model_types=("exaone4_5",),
    architectures=("Exaone4_5_ForConditionalGeneration",),
    keys=qwen_style(),
    layout=HeadLayout(),
    head=ROLES,
    block=lambda fields: _POST_NORM_BLOCK,
    block_kind="dense",
    trunk=Trunk(
        prefixes=_PREFIXES,
        lm_heads=("lm_head.weight", "language_model.lm_head.weight"),
        kinds={"dense": _POST_NORM_BLOCK},
    ),
    looked_up_as={"vllm": "mtp.layers.{module}."},
    served={"vllm": "0.20.0"},
    notes=(
        "the block normalises after attention and after the MLP, and has no input_layernorm",
        "served by vLLM only",
    ),
)
