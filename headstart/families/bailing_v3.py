"""Bailing's third generation: Ling-3.0, with latent attention and Kimi's delta attention."""

from __future__ import annotations

from headstart.errors import UnsupportedFamily
from headstart.families.bailing import (
    LATENT,
    NORM_HEAD,
    TRANSFORMERS,
    WIDE_SHARED_EXPERTS,
    shared_width_of_all,
)
from headstart.families.base import Family, HeadLayout, Part, Trunk, parts
from headstart.families.blocks import DENSE_MLP, EXPERTS, NORMS, ROLES, SHARED_EXPERTS
from headstart.families.deepseek import dense_then_moe
from headstart.families.dims import Fields
from headstart.families.keymaps import appended_layer
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime

_GATES = {
    "head_wise": parts("attention.g_proj.weight heads hidden"),
    "element_wise": parts("attention.g_proj.weight heads*v_dim hidden"),
}
_KDA = parts("""
    attention.q_proj.weight     heads*head_dim   hidden
    attention.k_proj.weight     heads*head_dim   hidden
    attention.v_proj.weight     heads*head_dim   hidden
    attention.f_proj.weight     heads*head_dim   hidden
    attention.g_proj.weight     heads*head_dim   hidden
    attention.b_proj.weight     heads            hidden
    attention.q_conv1d.weight   heads*head_dim   1   conv
    attention.k_conv1d.weight   heads*head_dim   1   conv
    attention.v_conv1d.weight   heads*head_dim   1   conv
    attention.A_log             heads
    attention.dt_bias           heads*head_dim
    attention.o_norm.weight     head_dim
    attention.dense.weight      hidden           heads*head_dim
""")


def _v3_latent(fields: Fields) -> tuple[Part, ...]:
    gate = _GATES.get(str(fields.get("gated_attention_proj_granularity_type") or "head_wise"), ())
    return NORMS + LATENT + gate


def _v3_moe(fields: Fields) -> tuple[Part, ...]:
    is_wide = fields.get("moe_shared_expert_intermediate_size") is not None
    shared = WIDE_SHARED_EXPERTS if is_wide else SHARED_EXPERTS
    return EXPERTS + shared + parts("mlp.gate.expert_bias experts")


def _v3_kinds(fields: Fields) -> dict[str, tuple[Part, ...]]:
    attention = {"latent": _v3_latent(fields), "recurrent": NORMS + _KDA}
    feeds = {"dense": DENSE_MLP, "moe": _v3_moe(fields)}
    return {f"{a}_{f}": attention[a] + feeds[f] for a in attention for f in feeds}


def _v3_kind(fields: Fields, layer: int) -> str:
    """The last layer of each group has attention; the first layers are dense."""
    group = int(fields.get("layer_group_size") or 1)
    layers = int(fields.get("num_hidden_layers") or 0)
    in_rest = layer >= layers // group * group  # what is left of the last group has attention, too
    attention = "latent" if (layer + 1) % group == 0 or in_rest else "recurrent"
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        attention = "recurrent" if kinds[layer] == "linear_attention" else "latent"
    return f"{attention}_{dense_then_moe(fields, layer)}"


_V3_PARAMETERS = parameters("""
    attention.compress.weight         attention.{q_proj,kv_a_proj_with_mqa}.weight
    attention.kv_latent_norm.weight   attention.kv_a_layernorm.weight
    attention.kv_up                   attention.kv_b_proj.weight
    attention.gate.weight             attention.g_proj.weight
    attention.o.weight                attention.dense.weight
    attention.inputs.weight           attention.{q,k,v,f,g,b}_proj.weight
    attention.q_conv                  attention.q_conv1d.weight
    attention.k_conv                  attention.k_conv1d.weight
    attention.v_conv                  attention.v_conv1d.weight
    attention.a_log                   attention.A_log
    attention.dt_bias                 attention.dt_bias
    attention.norm                    attention.o_norm.weight
    attention.out.weight              attention.dense.weight
    mlp.router.correction             mlp.gate.expert_bias
""")


def _v3_normalised(fields: Fields) -> Fields:
    """Recurrent layers have the heads of attention; which layers they are is a rule."""
    if not fields["no_kda_lora"]:
        raise UnsupportedFamily(
            "no_kda_lora is false; the engine computes decays and gates of Ling's recurrent layers "
            "by whole matrices, as its releases have them."
        )
    if fields.get("q_lora_rank"):
        raise UnsupportedFamily(
            f"q_lora_rank is {fields['q_lora_rank']}; the engine computes Ling-3.0 without a "
            "latent of queries, as its releases are."
        )
    layers = int(fields.get("num_hidden_layers") or 0)
    # transformers writes both apart, and another head_dim
    heads = fields.get("linear_num_heads") or fields.get("num_attention_heads")
    dim = fields.get("linear_head_dim") or fields.get("head_dim")
    gates = str(fields.get("gated_attention_proj_granularity_type") or "head_wise")
    if gates not in _GATES:
        raise UnsupportedFamily(
            f"gated_attention_proj_granularity_type is {gates!r}; the engine computes "
            f"{' and '.join(_GATES)} gates."
        )
    attends = [_v3_kind(fields, layer).startswith("latent") for layer in range(layers)]
    found = {
        "layer_types": [f"{'full' if each else 'linear'}_attention" for each in attends],
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_conv_kernel_dim": fields.get("short_conv_kernel_size"),
        "linear_lower_bound": fields.get("kda_lower_bound") if fields["kda_safe_gate"] else None,
        "gates_heads": gates == "head_wise",
    }
    return {**found, **_v3_limits(fields), **shared_width_of_all(fields)}


def _v3_limits(fields: Fields) -> Fields:
    """Limits of inner products by layer, of routed and shared experts; dense layers have none."""
    shared = list(fields.get("share_expert_swiglu_limit_list") or [])
    num_dense = min(int(fields.get("first_k_dense_replace") or 0), len(shared))
    return {
        "swiglu_limits": fields.get("expert_swiglu_limit_list"),
        "swiglu_limits_shared": [0.0] * num_dense + shared[num_dense:],
    }


_V3_ROOTS = ("model.", "model.language_model.", "language_model.model.")
V3 = Family(
    name="bailing_moe_v3",
    title="Ling-3.0-flash",
    model_types=("bailing_moe_v3",),
    architectures=("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
    marked_types=("bailing_hybrid",),
    marks=("short_conv_kernel_size", "kda_safe_gate", "kda_lower_bound", "no_kda_lora"),
    keys=appended_layer(roots=_V3_ROOTS, layers="layers.", out_norm="final_layernorm"),
    layout=HeadLayout(),
    head=ROLES,
    block=lambda fields: _v3_latent(fields) + _v3_moe(fields),
    block_kind="latent_moe",
    trunk=Trunk(
        prefixes=_V3_ROOTS,
        embed="word_embeddings.weight",
        lm_heads=("lm_head.weight", "language_model.lm_head.weight"),
        kinds_of=_v3_kinds,
        kind_of=_v3_kind,
        beside=("model.visual.", "visual."),
    ),
    kv_elements="kv_rank+rope_dim",
    looked_up_as={"vllm": "model.layers.{layer}."},
    served={"vllm": "0.28.0rc1", "sglang": "0.5.19", "llamacpp": "b10470"},
    variants={
        "vllm": {"BailingMoeV3VLForConditionalGeneration": "0.30.0"},
        "sglang": {"BailingMoeV3VLForConditionalGeneration": None},
    },
    variant_titles={"BailingMoeV3VLForConditionalGeneration": "Ling-3.0 with a vision part"},
    is_complete=True,
    runtime=Runtime(
        defaults={
            "no_kda_lora": True,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "short_conv_kernel_size": 4,
            "rope_theta": 6000000.0,
            "rms_norm_eps": 1e-6,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "head_dim": 128,
        },
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
        renamed={
            "num_expert_group": "n_group",
            "num_experts_per_token": "num_experts_per_tok",
            "moe_renormalize": "norm_topk_prob",
            "model_max_length": "max_position_embeddings",
        },
        normalise=_v3_normalised,
        refused={
            "norm_head": "the engine computes Ling-3.0 without a normalised LM head.",
            "use_bias": "the engine computes Ling-3.0 without biases.",
            "use_qkv_bias": "the engine computes Ling-3.0 without biases.",
        },
        parameters=_V3_PARAMETERS,
        has_gpu_kernels=False,
    ),
    notes=(
        "the fusion projection may be quantised",
        "gated_attention_proj_granularity_type: one gate for each head, or for each channel",
        "late layers limit their experts' inner products (expert_swiglu_limit_list, "
        "share_expert_swiglu_limit_list), behind the activation; transformers 5.22.2 leaves that "
        "out, and vLLM 0.32.0 limits routed experts before it",
        "SGLang ignores names that begin with model.mtp",
        "Ling-3.0-tiny declares 0 modules: it has no head",
        NORM_HEAD,
        TRANSFORMERS,
    ),
)
