"""GLM-5.3-Flash: an appended layer with latent attention without positions, and a pooled indexer.

The trunk has several residual streams and recurrent layers; the head has neither.
"""

from __future__ import annotations

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import (
    DENSE_MLP,
    HYPER,
    INDEXER,
    MLA,
    NORMS,
    ROLES,
    SIGMOID_MOE,
    dense_then_sparse,
)
from headstart.families.dims import Fields
from headstart.families.glm import shares_indexer
from headstart.families.keymaps import appended_layer
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime

_POOL = parts("""
    self_attn.indexer.index_kpool_compress_gate   index_dim   hidden
    self_attn.indexer.index_kpool_compress_ape    kpool       index_dim
""")
_SPARSE = NORMS + MLA + INDEXER + _POOL
_RECURRENT = NORMS + parts("""
    self_attn.q_proj.weight     kda_heads*kda_dim   hidden
    self_attn.k_proj.weight     kda_heads*kda_dim   hidden
    self_attn.v_proj.weight     kda_heads*kda_dim   hidden
    self_attn.o_proj.weight     hidden              kda_heads*kda_dim
    self_attn.q_conv1d.weight   kda_heads*kda_dim   1   conv
    self_attn.k_conv1d.weight   kda_heads*kda_dim   1   conv
    self_attn.v_conv1d.weight   kda_heads*kda_dim   1   conv
    self_attn.f_a_proj.weight   kda_dim             hidden
    self_attn.f_b_proj.weight   kda_heads*kda_dim   kda_dim
    self_attn.g_a_proj.weight   kda_dim             hidden
    self_attn.g_b_proj.weight   kda_heads*kda_dim   kda_dim
    self_attn.b_proj.weight     kda_heads           hidden
    self_attn.A_log             kda_heads
    self_attn.dt_bias           kda_heads*kda_dim
    self_attn.o_norm.weight     kda_dim
""")
_FEEDS = {"dense": DENSE_MLP, "sparse": SIGMOID_MOE}


def _kind(fields: Fields, layer: int) -> str:
    """Three recurrent layers, then one with attention; the first three are dense."""
    attention = fields.get("layer_types")
    has_attention = layer % 4 == 3
    if isinstance(attention, list) and layer < len(attention):
        has_attention = attention[layer] != "linear_attention"
    feed = dense_then_sparse(fields, layer, num_dense=3)
    return f"{'attention' if has_attention else 'recurrent'}_{feed}"


_NO_INDEXER = "the engine computes glm5_next with an indexer in every layer that attends"


def _normalised(fields: Fields) -> Fields:
    """Recurrent layers are described by fields of their own, or by one object."""
    count = int(fields.get("num_hidden_layers") or 0)
    listed = fields.get("layer_types")
    if isinstance(listed, list) and len(listed) != count:
        raise BadConfig(
            f"layer_types has {len(listed)} entries; expected one for each of {count} layers."
        )
    kinds = listed or ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
    kinds = ["full_attention" if kind == "indexed_attention" else kind for kind in kinds]
    if any(shares_indexer(fields, i) and kind[0] == "f" for i, kind in enumerate(kinds)):
        raise UnsupportedFamily(f"layers share an indexer (indexer_types); {_NO_INDEXER}.")
    if fields.get("index_kpool_always_select_tail") is False:
        raise UnsupportedFamily(
            "index_kpool_always_select_tail is false; the engine lets rows see the tokens behind "
            "the last pool in any case."
        )
    own = fields.get("linear_attn_config") or {}
    heads = own.get("num_heads") or fields.get("linear_num_heads")
    dim = own.get("head_dim") or fields.get("linear_head_dim")
    least = own.get("gate_lower_bound", fields.get("linear_lower_bound", -5.0))
    if least is None and own and own.get("safe_gate", True):
        least = -5.0
    most = [float(fields["swiglu_limit"])] * (count + 1)
    return {
        "layer_types": kinds,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_conv_kernel_dim": own.get("short_conv_kernel_size")
        or fields.get("linear_conv_kernel_dim"),
        "linear_lower_bound": least,
        "swiglu_limits": most,
        "swiglu_limits_shared": most,
        "latent_norm_eps": fields.get("rms_norm_eps"),
    }


_ROOTS = ("model.language_model.", "language_model.model.", "model.")

FAMILY = Family(
    name="glm5_next",
    title="GLM-5.3-Flash",
    model_types=("glm5_next", "glm5_next_text"),
    architectures=("Glm5NextForConditionalGeneration",),
    keys=appended_layer(roots=_ROOTS, layers="layers."),
    # The trunk's streams are averaged before its final norm.
    layout=HeadLayout(deviations={"vllm": {"zero_embed_at_position_0": True}}),
    head=ROLES,
    block=lambda fields: _SPARSE + SIGMOID_MOE,
    block_kind="attention_sparse",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(
        prefixes=_ROOTS,
        lm_heads=("lm_head.weight", "language_model.lm_head.weight"),
        kinds={
            f"{kind}_{feed}": layer + HYPER + mlp
            for kind, layer in {"attention": _SPARSE, "recurrent": _RECURRENT}.items()
            for feed, mlp in _FEEDS.items()
        },
        kind_of=_kind,
        beside=("model.visual.", "visual."),
    ),
    kv_elements="kv_rank+rope_dim+index_dim",
    looked_up_as={"vllm": "model.layers.{layer}.", "sglang": "model.decoder."},
    served={"vllm": "0.30.0", "sglang": "0.5.20", "xllm": "main"},
    elsewhere=(
        "mlx-vlm from 0.7.1 (a drafter's folder that its own splitter makes)",
        "exllamav3 (from its own converted file)",
        "LMDeploy from pull request 4968",
    ),
    is_complete=True,
    runtime=Runtime(
        defaults={
            "rms_norm_eps": 1e-5,
            "scoring_func": "sigmoid",
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "swiglu_limit": 10.0,
            "linear_conv_kernel_dim": 4,
            "qk_rope_head_dim": 0,
            "max_position_embeddings": 1048576,
        },
        fixed={"limits_before_activation": True},
        normalise=_normalised,
        rotates=False,
        streams="balanced",
        parameters=parameters("""
            attention.inputs.weight   self_attn.{q,k,v,f_a,g_a,b}_proj.weight
            attention.a_log           self_attn.A_log
            attention.dt_bias         self_attn.dt_bias
            attention.norm            self_attn.o_norm.weight
            attention.out.weight      self_attn.o_proj.weight
        """),
        has_gpu_kernels=False,
    ),
    notes=(
        "the block is plain: it has none of the trunk's streams",
        "RedHatAI's NVFP4 release keeps the head in model_mtp.safetensors, outside the index",
        "some ignore lists name model.layers.45.*, without language_model.",
        "index_share_for_mtp_iteration: later drafts may use the first one's choice of keys",
        "vLLM on ROCm needs pull request 55239",
    ),
)
