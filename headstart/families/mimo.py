"""MiMo-7B (also what Llama, Qwen2 and Mistral trunks become with a grafted head) and MiMo-V2."""

from __future__ import annotations

from typing import Any

from headstart.families.base import Family, HeadLayout, Part, Trunk, parts
from headstart.families.blocks import DENSE_MLP, EXPERTS, GQA, NORMS, QKV_BIAS, ROLES
from headstart.families.dims import Fields
from headstart.families.keymaps import mtp_layers
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime

_LAYER = NORMS + GQA + QKV_BIAS + DENSE_MLP
_CONFIG_CLASS = '''\
"""The config of MiMo: Qwen2's, plus how many prediction heads follow the layers."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, num_nextn_predict_layers: int = 1, **fields):
        self.num_nextn_predict_layers = num_nextn_predict_layers
        super().__init__(**fields)
'''

MIMO = Family(
    name="mimo",
    title="MiMo-7B Base, SFT, RL",
    model_types=("mimo",),
    architectures=("MiMoForCausalLM",),
    keys=mtp_layers(
        "model.mtp_layers.",
        embed_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        fuse="input_proj",
    ),
    layout=HeadLayout(
        fuse_order="hidden_first",
        zero_embed_at_position_0=True,
        deviations={"vllm": {"trunk_hidden": "before_final_norm"}},
    ),
    head=ROLES,
    block=lambda fields: _LAYER,
    block_kind="dense",
    trunk=Trunk(kinds={"dense": _LAYER}),
    looked_up_as={"vllm": "model.layers.{layer}.", "sglang": ""},
    served={"vllm": "0.9.0", "sglang": "0.4.6.post5", "xllm": "main CUDA devices only"},
    is_complete=True,
    auto_map={"AutoConfig": "configuration_mimo.MiMoConfig"},
    remote_code={"configuration_mimo.py": _CONFIG_CLASS},
    reasoning="think",
    runtime=Runtime(defaults={"attention_bias": True}),
)

_SWA = parts("""
    self_attn.q_proj.weight              swa_heads*swa_head_dim      hidden
    self_attn.k_proj.weight              swa_kv_heads*swa_head_dim   hidden
    self_attn.v_proj.weight              swa_kv_heads*swa_v_dim      hidden
    self_attn.o_proj.weight              hidden                      swa_heads*swa_v_dim
    self_attn.attention_sink_bias        swa_heads                   if add_swa_attention_sink_bias
""")
_V2_FEEDS = {
    "dense": DENSE_MLP,
    "moe": EXPERTS + parts("mlp.gate.e_score_correction_bias experts"),
}
_V2_HEAD_NORMS = parts("""
    input_layernorm.weight     hidden
    pre_mlp_layernorm.weight   hidden
""")
# V2-Pro and V2.5: one tensor in the place of q, k and v
_FUSED = {
    "full": "heads*head_dim+kv_heads*head_dim+kv_heads*v_dim",
    "swa": "swa_heads*swa_head_dim+swa_kv_heads*swa_head_dim+swa_kv_heads*swa_v_dim",
}
_APART = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def _v2_attention(fields: Fields) -> dict[str, tuple[Part, ...]]:
    """Tensors of both kinds of attention; releases with a fused qkv_proj say so in the config."""
    tables = {"full": GQA, "swa": _SWA}
    if fields.get("attention_projection_layout") != "fused_qkv":
        return tables
    return {
        kind: (
            Part("self_attn.qkv_proj.weight", (_FUSED[kind], "hidden")),
            *(part for part in table if part.name not in _APART),
        )
        for kind, table in tables.items()
    }


def _v2_kinds(fields: Fields) -> dict[str, tuple[Part, ...]]:
    return {
        f"{attends}_{feeds}": NORMS + table + _V2_FEEDS[feeds]
        for attends, table in _v2_attention(fields).items()
        for feeds in _V2_FEEDS
    }


def _v2_slides(fields: Fields, layer: int) -> bool:
    if layer >= int(fields.get("num_hidden_layers") or 0):
        return True
    pattern = fields.get("hybrid_layer_pattern")
    return isinstance(pattern, list) and pattern[layer] == 1


def _v2_kind(fields: Fields, layer: int) -> str:
    moe = fields.get("moe_layer_freq")
    attention = "swa" if _v2_slides(fields, layer) else "full"
    return f"{attention}_{'moe' if isinstance(moe, list) and moe[layer] else 'dense'}"


def _v2_normalised(fields: Fields) -> Fields:
    """What transformers writes for a release: layers by name, sliding heads by rule."""
    found: dict[str, Any] = {}
    by_layer = {"hybrid_layer_pattern": "layer_types", "moe_layer_freq": "mlp_layer_types"}
    for usual, named in by_layer.items():
        names = fields.get(named)
        if fields.get(usual) is None and isinstance(names, list):
            found[usual] = [int(name in ("sliding_attention", "sparse")) for name in names]
    rope = fields.get("rope_parameters") or {}
    if "sliding_attention" in rope and "full_attention" in rope:
        found["swa_rope_theta"] = rope["sliding_attention"].get("rope_theta")
        found["rope_parameters"] = rope["full_attention"]
    for name, times in (
        ("num_attention_heads", 1), ("num_key_value_heads", 2), ("head_dim", 1), ("v_head_dim", 1),
    ):  # fmt: skip
        value = fields.get(name)
        if fields.get(f"swa_{name}") is None and isinstance(value, int):
            found[f"swa_{name}"] = times * value
    found["swa_partial_rotary_factor"] = fields["partial_rotary_factor"]
    # as SGLang and transformers count: so many before the row, and the row
    found["swa_window"] = fields["sliding_window_size"] + 1
    return found


_V2_WITHOUT = "the engine computes MiMo-V2 without, as its releases are."

V2 = Family(
    name="mimo_v2",
    title="MiMo-V2-Flash, V2-Pro, V2.5, V2.5-Pro, V2.5-Omni",
    model_types=("mimo_v2_flash", "mimo_v2", "mimo_v2_omni"),
    architectures=(
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiMoV2OmniForCausalLM",
    ),
    count_field=None,
    default_modules=3,
    keys=mtp_layers("model.mtp.layers."),
    layout=HeadLayout(
        topology="parallel",
        deviations={"vllm": {"topology": "recursive"}},  # runs module 0 for every depth
    ),
    head=ROLES,
    block=lambda fields: _v2_attention(fields)["swa"] + DENSE_MLP + _V2_HEAD_NORMS,
    trunk=Trunk(
        kinds_of=_v2_kinds,
        kind_of=_v2_kind,
        slides=_v2_slides,
        # of V2.5-Omni, as vLLM 0.33.0 reads it
        beside=(
            "visual.",
            "model.visual.",
            "audio_encoder.",
            "speech_embeddings.",
            "audio_tokenizer.",
        ),
    ),
    kv_elements="swa_kv_heads*swa_head_dim+swa_kv_heads*swa_v_dim",
    looked_up_as={"vllm": "model.mtp.layers.{module}.", "sglang": "model.decoder."},
    served={
        "vllm": "0.21.0 only the first module is loaded and reused for every draft",
        "sglang": "0.5.7 one draft runner per module",
        "llamacpp": "b10184 heads with a fused attn_qkv only, which V2-Flash has not",
    },
    variants={"sglang": {"mimo_v2": "0.5.11"}},
    variant_titles={"mimo_v2": "V2-Pro and V2.5"},
    is_complete=True,
    runtime=Runtime(
        defaults={
            "scoring_func": "sigmoid",
            "partial_rotary_factor": 0.334,
            "rope_theta": 5000000.0,
            "swa_rope_theta": 10000.0,
            "sliding_window_size": 128,
            "n_shared_experts": 0,
            "layernorm_epsilon": 1e-5,
        },
        renamed={"layernorm_epsilon": "rms_norm_eps"},
        normalise=_v2_normalised,
        refused=dict.fromkeys(("attention_bias", "add_full_attention_sink_bias"), _V2_WITHOUT),
        partial_rotary=True,
        parameters=parameters("mlp_norm.weight   pre_mlp_layernorm.weight"),  # of its heads
        qkv_ranks="num_key_value_heads",
    ),
    notes=(
        "V2.5 stores a fused qkv_proj in four chunks, V2.5-Pro in eight, one for each K/V head of "
        "the trunk and rank: copied as it is, and put in order by our engine",
        "vLLM uses the first of the three modules only",
        "of V2.5-Omni the engine runs the text part, beside the names that vLLM 0.33.0 reads",
    ),
)
