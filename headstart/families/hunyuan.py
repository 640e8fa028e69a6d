"""Hunyuan 3 and 4.

Version 3 appends a MoE layer with `final_layernorm`; embedding and LM head are the trunk's.
Version 4 has `model.mtp_layers.` with gated latent attention and a sink per head.
"""

from __future__ import annotations

from headstart.errors import BadConfig, UnsupportedFamily, some
from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import (
    DENSE_MLP,
    INDEXER,
    MLA,
    NORMS,
    ROLES,
    SIGMOID_MOE,
    dense_then_sparse,
)
from headstart.families.cautions import Caution
from headstart.families.deepseek import dense_then_moe
from headstart.families.dims import Fields
from headstart.families.glm import shares_indexer
from headstart.families.keymaps import appended_layer, mtp_layers
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime

V3 = Family(
    name="hy_v3",
    title="Hunyuan 3 (Hy3-preview)",
    model_types=("hy_v3",),
    architectures=("HYV3ForCausalLM",),
    # A stored head is `shared_head.weight` or `shared_head.head.weight`; engines read neither.
    keys=appended_layer(out_norm="final_layernorm", lm_head="shared_head"),
    layout=HeadLayout(deviations={"vllm": {"zero_embed_at_position_0": True}}),
    head=ROLES,
    # No block table: the router is mlp.router.gate in some checkpoints, mlp.gate.wg in others.
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(kind_of=dense_then_moe),
    looked_up_as={"vllm": "model.layers.{layer}."},
    served={"vllm": "0.20.0", "sglang": "0.5.11", "llamacpp": "b9993"},
    cautions=(
        Caution(
            engine="sglang",
            since="0.5.11",
            before="0.5.16",
            text="final_layernorm is not loaded (shared_head.norm is looked for), so few drafts "
            "are accepted; use 0.5.16 or later",
        ),
    ),
    notes=("an embedding or LM head stored in the head is ignored; the trunk's are used",),
)

_GATED = parts("""
    self_attn.linear_gate.weight     heads*v_dim   hidden
    self_attn.learnable_sink_param   heads
""")
_SHARED = NORMS + MLA + _GATED  # attends to what an earlier layer's indexer chose
_FULL = _SHARED + INDEXER
_HYPER = parts("""
    hc_attn_layer.hc_pre.hc_fn      2*hc   hc*hidden
    hc_attn_layer.hc_pre.hc_base    2*hc
    hc_attn_layer.hc_pre.hc_scale   2
    hc_mlp_layer.hc_pre.hc_fn       2*hc   hc*hidden
    hc_mlp_layer.hc_pre.hc_base     2*hc
    hc_mlp_layer.hc_pre.hc_scale    2
""")
_ROUTER = tuple(part for part in SIGMOID_MOE if "{expert}" not in part.name)
_FUSED_MOE = _ROUTER + parts("""
    mlp.experts.gate_up_proj   experts   2*moe_width   hidden
    mlp.experts.down_proj      experts   hidden        moe_width
""")
_FEEDS = {"dense": DENSE_MLP, "sparse": _FUSED_MOE}  # trunks keep experts fused


def _kind(fields: Fields, layer: int) -> str:
    feed = dense_then_sparse(fields, layer, num_dense=1)
    return f"{'shared' if shares_indexer(fields, layer) else 'full'}_{feed}"


# names of layers that choose what they see: those of transformers and of vLLM
_CHOOSING = ("indexed_attention", "sparse_attention", "sparse", "deepseek_sparse_attention")
_SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq")


def _normalised(fields: Fields) -> Fields:
    """Limits are one number there, which holds for routed experts."""
    kinds = fields.get("layer_types") or []
    if others := sorted({str(kind) for kind in kinds} - set(_CHOOSING)):
        raise UnsupportedFamily(
            f"layer_types holds {some(others)}; the engine computes hy_v4 with layers that all "
            f"choose what they see ({', '.join(_CHOOSING)}), as its releases are."
        )
    if all(fields.get(name) is None for name in _SHARING):
        raise BadConfig(
            "the config does not say which layers share an indexer (indexer_types), and engines "
            "take different ones for granted. Take the config.json of the model's release."
        )
    for name in ("enable_ihc", "gated_mla", "learnable_sink"):
        if fields.get(name) is False:
            raise UnsupportedFamily(f"{name} is false; the engine computes hy_v4 with it only.")
    if fields.get("gating_type") not in (None, "elementwise"):
        raise UnsupportedFamily(
            f"gating_type is {fields['gating_type']!r}; the engine computes 'elementwise' gates."
        )
    most = max(float(fields["swiglu_limit"]), 0.0)
    return {
        "swiglu_limits": [most] * (int(fields.get("num_hidden_layers") or 0) + 1),
        "latent_norm_eps": fields.get("rms_norm_eps"),
    }


V4 = Family(
    name="hy_v4",
    title="Hunyuan 4 (Hy4-preview)",
    model_types=("hy_v4",),
    architectures=("HYV4ForCausalLM",),
    may_count_one_more=True,
    keys=mtp_layers(
        "model.mtp_layers.",
        respelled={
            "model.mtp.layers.": "model.mtp_layers.",
            ".self_attn.g_proj.": ".self_attn.linear_gate.",
            ".mlp.router.gate.": ".mlp.gate.",
        },
    ),
    # fed after the streams were joined (hc_head) and normalised, so it is one hidden size wide
    layout=HeadLayout(deviations={"vllm": {"zero_embed_at_position_0": True}}),
    head=ROLES,
    block=lambda fields: _FULL + SIGMOID_MOE,
    block_kind="full_sparse",
    trunk=Trunk(
        kinds={
            f"{kind}_{feed}": layer + _HYPER + mlp
            for kind, layer in {"full": _FULL, "shared": _SHARED}.items()
            for feed, mlp in _FEEDS.items()
        },
        kind_of=_kind,
        extras=parts("""
            hc_head.hc_head_fn      hc   hc*hidden
            hc_head.hc_head_base    hc
            hc_head.hc_head_scale   1
        """),
    ),
    kv_elements="kv_rank+rope_dim+index_dim",
    looked_up_as={"vllm": "model.layers.{layer}.", "sglang": "model.decoder."},
    served={"vllm": "0.29.0", "sglang": "0.5.20"},
    elsewhere=("mlx-vlm from 0.7.1 (a drafter's folder that its own splitter makes)",),
    is_complete=True,
    runtime=Runtime(
        defaults={
            "rms_norm_eps": 1e-5,
            "scoring_func": "sigmoid",
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.827,
            "swiglu_limit": 10.0,
            "max_position_embeddings": 262144,
        },
        fixed={
            "rope_interleave": True,
            "indexer_rope_interleave": True,
            "indexer_rotates_last": True,
            "limits_before_activation": True,
        },
        normalise=_normalised,
        streams="independent",
        parameters=parameters("""
            attention.gate.weight             self_attn.linear_gate.weight
            attention.sinks                   self_attn.learnable_sink_param
            attention_streams.shares.weight   hc_attn_layer.hc_pre.hc_fn
            attention_streams.shares.base     hc_attn_layer.hc_pre.hc_base
            attention_streams.shares.scale    hc_attn_layer.hc_pre.hc_scale
            mlp_streams.shares.weight         hc_mlp_layer.hc_pre.hc_fn
            mlp_streams.shares.base           hc_mlp_layer.hc_pre.hc_base
            mlp_streams.shares.scale          hc_mlp_layer.hc_pre.hc_scale
            final_norm.join.weight            hc_head.hc_head_fn
            final_norm.join.base              hc_head.hc_head_base
            final_norm.join.scale             hc_head.hc_head_scale
        """),
        has_gpu_kernels=False,
    ),
    notes=(
        "pairs that are rotated are neighbours (vLLM, SGLang, and here); transformers 5.22.2 "
        "rotates halves and may compute something else with released weights",
        "norms of latents have rms_norm_eps (vLLM, and here), in transformers 1e-6",
        "where a config has no layer_types, transformers and the engine attend to index_topk "
        "tokens, vLLM 0.32.0 to all of them",
        "exports that count 2 modules for the one that is stored exist",
        "model.mtp.layers.0., self_attn.g_proj and mlp.router.gate are read as well and written "
        "under the usual names: vLLM 0.32.0 and SGLang 0.5.23 ask for those only",
        "ignore lists name model.mtp_layers.0.*, which engines rename before they ask",
        "mtp_quant_algo says how the head of an MXFP8 release is quantised: FP8, BF16 or NONE",
    ),
)
