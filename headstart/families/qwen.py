"""Qwen3-Next, Qwen3.5 / 3.6 (dense and MoE), and heads in Qwen style on plain Qwen3 trunks."""

from __future__ import annotations

from dataclasses import replace

from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import (
    DENSE_MLP,
    GATED_GQA,
    GQA,
    NORMS,
    QK_NORM,
    QWEN_MOE,
    ROLES,
)
from headstart.families.cautions import Caution
from headstart.families.dims import Fields
from headstart.families.keymaps import qwen_style
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime

_DENSE = NORMS + GATED_GQA + DENSE_MLP
_MOE = NORMS + GATED_GQA + QWEN_MOE
_DELTA_NET = parts("""
    linear_attn.conv1d.weight     2*lin_k_heads*lin_k_dim+lin_v_heads*lin_v_dim   1   conv
    linear_attn.A_log             lin_v_heads
    linear_attn.dt_bias           lin_v_heads
    linear_attn.norm.weight       lin_v_dim
    linear_attn.out_proj.weight   hidden   lin_v_heads*lin_v_dim
""")
_NEXT_DELTA_NET = _DELTA_NET + parts("""
    linear_attn.in_proj_qkvz.weight   2*lin_k_heads*lin_k_dim+2*lin_v_heads*lin_v_dim   hidden
    linear_attn.in_proj_ba.weight     2*lin_v_heads   hidden
""")
SPLIT_DELTA_NET = _DELTA_NET + parts("""
    linear_attn.in_proj_qkv.weight   2*lin_k_heads*lin_k_dim+lin_v_heads*lin_v_dim   hidden
    linear_attn.in_proj_z.weight     lin_v_heads*lin_v_dim   hidden
    linear_attn.in_proj_b.weight     lin_v_heads   hidden
    linear_attn.in_proj_a.weight     lin_v_heads   hidden
""")


def layer_type(fields: Fields, layer: int) -> str:
    """`full_attention` or `linear_attention`, by list or by interval."""
    types = fields.get("layer_types")
    if isinstance(types, list) and layer < len(types):
        return str(types[layer])
    interval = fields.get("full_attention_interval") or 4
    return "full_attention" if (layer + 1) % interval == 0 else "linear_attention"


def next_layer_type(fields: Fields, layer: int) -> str:
    """The same for Qwen3-Next, where single layers may lack experts: `dense_...`."""
    return ("" if has_experts(fields, layer) else "dense_") + layer_type(fields, layer)


def has_experts(fields: Fields, layer: int) -> bool:
    """Whether a layer of a MoE trunk has them: not those listed, and of the others every n-th."""
    step = fields.get("decoder_sparse_step") or 1
    return layer not in (fields.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


_RUNTIME = Runtime(
    defaults={
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        "head_dim": 256,
        "use_qk_norm": True,
    },
    partial_rotary=True,
    gated_attention=True,
    output_bias=True,
)
_SHARED_EXPERT = parameters("""
    mlp.shared.gate_up.weight   mlp.shared_expert.{gate,up}_proj.weight
    mlp.shared.down.weight      mlp.shared_expert.down_proj.weight
""")
# rows of queries, keys, values and gates are stored key head by key head
_JOINED_INPUTS = parameters("attention.inputs.weight   linear_attn.in_proj_{qkvz,ba}.weight")
_LAYOUT = HeadLayout(zero_centred_norms=True)
_LOOKED_UP = {"vllm": "mtp.layers.{module}.", "sglang": "mtp.layers.{module}."}
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
VISION = ("model.visual.", "visual.")
LM_HEADS = (
    "lm_head.weight",
    "model.lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
)

NEXT = Family(
    name="qwen3_next",
    title="Qwen3-Next-80B-A3B",
    model_types=("qwen3_next",),
    architectures=("Qwen3NextForCausalLM",),
    count_field=None,
    keys=qwen_style(),
    layout=_LAYOUT,
    head=ROLES,
    block=lambda fields: _MOE,
    block_kind="full_attention",
    trunk=Trunk(
        kinds={
            "full_attention": _MOE,
            "linear_attention": NORMS + _NEXT_DELTA_NET + QWEN_MOE,
            "dense_full_attention": _DENSE,
            "dense_linear_attention": NORMS + _NEXT_DELTA_NET + DENSE_MLP,
        },
        kind_of=next_layer_type,
    ),
    looked_up_as={"vllm": "mtp.layers.{module}.", "sglang": "model.layers.0."},
    served={
        "vllm": "0.10.2",
        "sglang": "0.5.2",
        "trtllm": "1.3.0rc14",
        "llamacpp": "b10238",
        "mlx": "0.6.15",
    },
    is_complete=True,
    runtime=replace(_RUNTIME, parameters={**_SHARED_EXPERT, **_JOINED_INPUTS}),
    notes=("the config carries no count that engines rely on; they assume one module",),
)

_PIPELINED = Caution(
    engine="vllm",
    is_occasional=True,
    text="with pipeline parallel the head leaves its fusion out and about 1 % is accepted, unless "
    "the release has vllm-project/vllm#46994",
)
_OWN_LM_HEAD = Caution(
    engine="vllm",
    is_occasional=True,
    text="an LM head of the head's own (mtp.lm_head) is left out (vllm-project/vllm#52013, open)",
)

QWEN3_5 = Family(
    name="qwen3_5",
    title="Qwen3.5, Qwen3.6, Qwen3.8-27B (dense)",
    model_types=("qwen3_5", "qwen3_5_text"),
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    count_field="mtp_num_hidden_layers",
    keys=qwen_style(),
    layout=_LAYOUT,
    head=ROLES,
    block=lambda fields: _DENSE,
    block_kind="full_attention",
    trunk=Trunk(
        prefixes=PREFIXES,
        lm_heads=LM_HEADS,
        beside=VISION,
        kinds={
            "full_attention": _DENSE,
            "linear_attention": NORMS + SPLIT_DELTA_NET + DENSE_MLP,
        },
        kind_of=layer_type,
    ),
    looked_up_as=_LOOKED_UP,
    served={
        "vllm": "0.17.0",
        "sglang": "0.5.9",
        "trtllm": "1.3.0rc14",
        "xllm": "0.9.0",
        "llamacpp": "b9180",
        "mlx": "0.6.15",
    },
    cautions=(_PIPELINED, _OWN_LM_HEAD),
    # by architecture: the text part of every Qwen3.5 has the model_type of a text-only one
    variants={
        "sglang": {"Qwen3_5ForCausalLM": "0.5.17"},
        "trtllm": {"Qwen3_5ForConditionalGeneration": None},
    },
    variant_titles={
        "Qwen3_5ForCausalLM": "text-only checkpoints",
        "Qwen3_5ForConditionalGeneration": "a dense model with a vision part",
    },
    is_complete=True,
    runtime=_RUNTIME,
)

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    title="Qwen3.5, Qwen3.6 MoE (35B-A3B, 122B-A10B, 397B-A17B)",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    count_field="mtp_num_hidden_layers",
    keys=qwen_style(),
    layout=_LAYOUT,
    head=ROLES,
    block=lambda fields: _MOE,
    block_kind="full_attention",
    trunk=Trunk(
        prefixes=PREFIXES,
        lm_heads=LM_HEADS,
        beside=VISION,
        kinds={
            "full_attention": _MOE,
            "linear_attention": NORMS + SPLIT_DELTA_NET + QWEN_MOE,
        },
        kind_of=layer_type,
    ),
    looked_up_as=_LOOKED_UP,
    served={
        "vllm": "0.17.0",
        "sglang": "0.5.9",
        "trtllm": "1.3.0rc14",
        "xllm": "0.9.0",
        "llamacpp": "b9180",
        "mlx": "0.6.15",
    },
    cautions=(_PIPELINED, _OWN_LM_HEAD),
    variants={"sglang": {"Qwen3_5MoeForCausalLM": "0.5.17"}},
    variant_titles={"Qwen3_5MoeForCausalLM": "text-only checkpoints"},
    is_complete=True,
    runtime=replace(_RUNTIME, parameters=_SHARED_EXPERT),
    notes=("experts are stored one by one (Qwen3.5) or fused (Qwen3.6); either is kept",),
)

INTERN_S2 = Family(
    name="intern_s2",
    title="Intern-S2-Preview, Intern-S2-Mobius",
    model_types=("intern_s2_preview", "interns2_mobius"),
    architectures=(
        "InternS2PreviewForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
    ),
    count_field="mtp_num_hidden_layers",
    keys=qwen_style(),
    layout=_LAYOUT,
    head=ROLES,
    block=lambda fields: _MOE if fields.get("num_experts") else _DENSE,
    head_fields={"num_experts": "mtp_num_experts"},
    trunk=Trunk(prefixes=PREFIXES, lm_heads=LM_HEADS, beside=VISION),
    served={"vllm": "0.22.0", "sglang": "0.5.12"},
    variants={"vllm": {"interns2_mobius": "0.28.0rc1"}, "sglang": {"interns2_mobius": "0.5.18"}},
)

QWEN3_LAYER = NORMS + GQA + QK_NORM + DENSE_MLP

QWEN3 = Family(
    name="qwen3",
    title="Qwen3 dense with a grafted or privately trained head",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    count_field="mtp_num_hidden_layers",
    keys=qwen_style(),
    # by its class for MiMo-7B; our plugin's own class does as the head was trained
    layout=HeadLayout(deviations={"vllm": {"zero_embed_at_position_0": True}}),
    head=ROLES,
    block=lambda fields: QWEN3_LAYER,
    block_kind="dense",
    trunk=Trunk(kinds={"dense": QWEN3_LAYER}),
    is_published=False,
    is_complete=True,
    served_apart={
        "vllm": "0.26.0 stock vLLM where head_dim is hidden_size / num_attention_heads, else with "
        "our plugin"
    },
    runtime=Runtime(defaults={"use_qk_norm": True}, output_bias=True),
    notes=("no published Qwen3 has a head; Headstart and speculators run this layout",),
)
