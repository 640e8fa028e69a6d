"""GLM-4.5 to 4.7, GLM-4.7-Flash, GLM-5.x and GLM-OCR."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import (
    DENSE_MLP,
    GQA,
    INDEXER,
    MLA,
    NORMS,
    QKV_BIAS,
    ROLES,
    SIGMOID_MOE,
)
from headstart.families.cautions import Caution
from headstart.families.deepseek import LATENT_DEFAULTS, LAYOUT, dense_then_moe
from headstart.families.dims import Fields
from headstart.families.keymaps import appended_layer
from headstart.families.runtime import Runtime

_ATTENTION = (
    GQA
    + QKV_BIAS
    + parts("""
    self_attn.q_norm.weight   head_dim   if use_qk_norm
    self_attn.k_norm.weight   head_dim   if use_qk_norm
""")
)
_MOE_LAYER = NORMS + _ATTENTION + SIGMOID_MOE
_LITE_LAYER = NORMS + MLA + SIGMOID_MOE
_SPARSE_LAYER = NORMS + MLA + INDEXER + SIGMOID_MOE

_LATENT_DEFAULTS = {
    **LATENT_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202752,
}
_VLLM = {"zero_embed_at_position_0": True, "recycled_hidden": "before_out_norm"}
_LAYOUT = HeadLayout(deviations={"vllm": _VLLM})
_LOOKED_UP = {"vllm": "model.layers.{layer}.", "sglang": "model.decoder."}

GLM4_MOE = Family(
    name="glm4_moe",
    title="GLM-4.5, 4.5-Air, 4.6, 4.7",
    model_types=("glm4_moe",),
    architectures=("Glm4MoeForCausalLM",),
    keys=appended_layer(),
    layout=_LAYOUT,
    head=ROLES,
    block=lambda fields: _MOE_LAYER,
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(
        kinds={"dense": NORMS + _ATTENTION + DENSE_MLP, "moe": _MOE_LAYER},
        kind_of=dense_then_moe,
    ),
    looked_up_as=_LOOKED_UP,
    served={"vllm": "0.10.0", "sglang": "0.4.9.post5", "trtllm": "1.2.0", "xllm": "0.7.0"},
    is_complete=True,
    runtime=Runtime(
        defaults={
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "scoring_func": "sigmoid",
            "first_k_dense_replace": 1,
        },
        partial_rotary=True,
    ),
    notes=(
        "4.5 stores copies of embedding and LM head in the head, 4.6 and later do not",
        "vLLM recycles the state before the out norm: acceptance past depth 1 suffers there",
    ),
)

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    title="GLM-4.7-Flash",
    model_types=("glm4_moe_lite",),
    architectures=("Glm4MoeLiteForCausalLM",),
    keys=appended_layer(),
    layout=_LAYOUT,
    head=ROLES,
    block=lambda fields: _LITE_LAYER,
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(
        kinds={"dense": NORMS + MLA + DENSE_MLP, "moe": _LITE_LAYER}, kind_of=dense_then_moe
    ),
    kv_elements="kv_rank+rope_dim",
    looked_up_as=_LOOKED_UP,
    served={
        "vllm": "0.15.0",
        "sglang": "0.5.13 earlier releases load it into a class without MLA",
        "llamacpp": "b10251",
    },
    notes=("the release stores copies of embedding and LM head in the head",),
    is_complete=True,
    runtime=Runtime(
        defaults={
            **_LATENT_DEFAULTS,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
        }
    ),
)


def _dsa_kind(fields: Fields, layer: int) -> str:
    """Some layers have no indexer and see what an earlier one chose."""
    kind = dense_then_moe(fields, layer)
    return f"shared_{kind}" if shares_indexer(fields, layer) else kind


def shares_indexer(fields: Fields, layer: int) -> bool:
    """By name, by a pattern of letters, or every so many layers."""
    named = fields.get("indexer_types") or fields.get("index_topk_pattern")
    if isinstance(named, list | str):
        return layer < len(named) and named[layer] in ("shared", "S")
    often = max(int(fields.get("index_topk_freq") or 1), 1)
    offset = fields.get("index_skip_topk_offset")
    return max(layer - (2 if offset is None else int(offset)) + 1, 0) % often != 0


GLM_MOE_DSA = Family(
    name="glm_moe_dsa",
    title="GLM-5, 5.1, 5.2",
    model_types=("glm_moe_dsa",),
    architectures=("GlmMoeDsaForCausalLM",),
    keys=appended_layer(),
    layout=LAYOUT,
    head=ROLES,
    block=lambda fields: _SPARSE_LAYER,
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(
        kinds={
            "dense": NORMS + MLA + INDEXER + DENSE_MLP,
            "moe": _SPARSE_LAYER,
            "shared_dense": NORMS + MLA + DENSE_MLP,
            "shared_moe": _LITE_LAYER,
        },
        kind_of=_dsa_kind,
    ),
    kv_elements="kv_rank+rope_dim+index_dim",
    looked_up_as=_LOOKED_UP,
    also_asked_as={"fuse": ("model.eh_proj",)},  # SGLang with quark
    served={
        "vllm": "0.16.0",
        "sglang": "0.5.9",
        "trtllm": "1.3.0rc9",
        "xllm": "0.9.0",
        "llamacpp": "b10174 the attention of the head is run dense",
    },
    cautions=(
        Caution(
            engine="vllm",
            is_occasional=True,
            text="1 to 2 % accepted at depth 1 with GLM-5.3 on NVIDIA GPUs (vllm-project/vllm"
            "#55605, open)",
        ),
    ),
    is_complete=True,
    runtime=Runtime(defaults={**_LATENT_DEFAULTS, "indexer_rope_interleave": True}),
    notes=("a community sidecar uses model_type glm_moe_dsa_mtp",),
)

_OCR_ROOTS = ("model.language_model.", "language_model.model.", "model.")
_OCR_PARTS = parts("""
    post_self_attn_layernorm.weight   hidden
    post_mlp_layernorm.weight         hidden
    mlp.gate_up_proj.weight           2*intermediate   hidden
    mlp.down_proj.weight              hidden           intermediate
""")
_OCR_LAYER = NORMS + GQA + _OCR_PARTS

GLM_OCR = Family(
    name="glm_ocr",
    title="GLM-OCR",
    model_types=("glm_ocr", "glm_ocr_text"),
    architectures=("GlmOcrForConditionalGeneration",),
    keys=appended_layer(roots=_OCR_ROOTS, layers="layers."),
    layout=_LAYOUT,
    head=ROLES,
    block=lambda fields: _OCR_LAYER,
    block_kind="dense",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(prefixes=_OCR_ROOTS, kinds={"dense": _OCR_LAYER}),
    looked_up_as=_LOOKED_UP,
    served={"vllm": "0.16.0", "sglang": "0.5.9"},
    lacks="norms behind attention and MLP, and positions of images",
    notes=("image positions: the head takes the trunk's M-RoPE positions and merged embeddings",),
)
