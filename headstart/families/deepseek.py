"""DeepSeek-V3, R1, V3.1 and V3.2, and the families that store and compute heads as they do."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk
from headstart.families.blocks import DENSE_MLP, INDEXER, MLA, NORMS, ROLES, SIGMOID_MOE
from headstart.families.dims import Fields
from headstart.families.keymaps import appended_layer
from headstart.families.runtime import Runtime

MOE_LAYER = NORMS + MLA + SIGMOID_MOE
DENSE_LAYER = NORMS + MLA + DENSE_MLP
SPARSE_LAYER = NORMS + MLA + INDEXER + SIGMOID_MOE


def dense_then_moe(fields: Fields, layer: int) -> str:
    """The first layers are dense, all later ones (and every head) MoE."""
    return "dense" if layer < int(fields.get("first_k_dense_replace") or 0) else "moe"


# what classes with latent attention take where a config is silent
LATENT_DEFAULTS = {
    "scoring_func": "sigmoid",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}
_DEFAULTS = {
    **LATENT_DEFAULTS,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
}
# vLLM's class of DeepSeek heads (its pull request 45895)
FORMER = {"vllm": ("0.24.0", {"recycled_hidden": "before_out_norm"})}
LAYOUT = HeadLayout(deviations={"vllm": {"zero_embed_at_position_0": True}}, former=FORMER)

V3 = Family(
    name="deepseek_v3",
    title="DeepSeek-V3, V3-0324, R1, R1-0528, V3.1",
    model_types=("deepseek_v3",),
    architectures=("DeepseekV3ForCausalLM",),
    keys=appended_layer(),
    layout=LAYOUT,
    head=ROLES,
    block=lambda fields: MOE_LAYER,
    block_variants=(DENSE_LAYER,),  # JoyAI-LLM-Flash
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(kinds={"dense": DENSE_LAYER, "moe": MOE_LAYER}, kind_of=dense_then_moe),
    kv_elements="kv_rank+rope_dim",
    looked_up_as={"vllm": "model.layers.{layer}.", "sglang": "model.decoder."},
    also_asked_as={"fuse": ("model.eh_proj",)},  # SGLang with quark
    served={"vllm": "0.7.3", "sglang": "0.4.3.post1", "trtllm": "1.0.0", "xllm": "0.6.0"},
    is_complete=True,
    runtime=Runtime(defaults={**_DEFAULTS, "max_position_embeddings": 4096}),
    notes=(
        "xLLM recycles the block output before the out norm on Ascend",
        "JoyAI-LLM-Flash stores its head the same way, with a dense MLP in the block",
    ),
)

V32 = Family(
    name="deepseek_v32",
    title="DeepSeek-V3.2, V3.2-Exp",
    model_types=("deepseek_v32",),
    architectures=("DeepseekV32ForCausalLM",),
    marked_types=("deepseek_v3",),
    marks=("index_head_dim", "index_n_heads", "index_topk"),
    keys=appended_layer(),
    layout=LAYOUT,
    head=ROLES,
    block=lambda fields: SPARSE_LAYER,
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(
        kinds={"dense": NORMS + MLA + INDEXER + DENSE_MLP, "moe": SPARSE_LAYER},
        kind_of=dense_then_moe,
    ),
    kv_elements="kv_rank+rope_dim+index_dim",
    looked_up_as={"vllm": "model.layers.{layer}.", "sglang": "model.decoder."},
    also_asked_as={"fuse": ("model.eh_proj",)},  # SGLang with quark
    served={
        "vllm": "0.11.0",
        "sglang": "0.5.3",
        "trtllm": "1.2.0",
        "xllm": "0.9.0",
        "llamacpp": "b10237 the attention of the head is run dense",
    },
    is_complete=True,
    runtime=Runtime(defaults={**_DEFAULTS, "max_position_embeddings": 163840}),
)
