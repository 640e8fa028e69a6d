"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): no release has a head; a grafted one is that of Qwen3.

Its block is a dense layer of the config's `intermediate_size`. In Qwen3-30B-A3B and 235B-A22B that
is what the experts of a token have together (8 x 768, 8 x 1536), so a draft reads as much as the
active part of a trunk layer; every engine that runs a head of dense Qwen3 runs it.
"""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk
from headstart.families.blocks import EXPERTS, GQA, NORMS, QK_NORM, ROLES
from headstart.families.keymaps import qwen_style
from headstart.families.qwen import QWEN3, QWEN3_LAYER, has_experts
from headstart.families.runtime import Runtime

FAMILY = Family(
    name="qwen3_moe",
    title="Qwen3-MoE (30B-A3B, 235B-A22B, Coder) with a grafted head",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    count_field="mtp_num_hidden_layers",
    keys=qwen_style(),
    layout=HeadLayout(deviations=QWEN3.layout.deviations),
    head=ROLES,
    block=lambda fields: QWEN3_LAYER,
    block_kind="dense",
    trunk=Trunk(
        kinds={"sparse": NORMS + GQA + QK_NORM + EXPERTS, "dense": QWEN3_LAYER},
        kind_of=lambda fields, layer: "sparse" if has_experts(fields, layer) else "dense",
    ),
    is_published=False,
    is_complete=True,
    served_apart=QWEN3.served_apart,
    runtime=Runtime(
        defaults={"use_qk_norm": True, "norm_topk_prob": False},
        output_bias=True,
        has_windows=False,
        refused={
            "use_sliding_window": "the engine computes Qwen3-MoE without windows, as its releases "
            "are.",
        },
    ),
    notes=(
        "no published Qwen3-MoE has a head; that of `graft` has a dense block as wide as "
        "intermediate_size says, whose MLP adds nothing before it is trained",
        "SGLang has a drafting class for Qwen3MoeForCausalLM; weights for it are not known, and "
        "`launch` does not use it",
    ),
)
