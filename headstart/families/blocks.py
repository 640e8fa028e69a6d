"""Decoder-layer building blocks that several families share, as part tables."""

from __future__ import annotations

from headstart.families.base import parts
from headstart.families.dims import Fields

# The tensors around the block, under our names.
ROLES = parts("""
    embed_norm.weight    hidden
    hidden_norm.weight   hidden
    fuse.weight          hidden 2*hidden
    out_norm.weight      hidden
""")

NORMS = parts("""
    input_layernorm.weight            hidden
    post_attention_layernorm.weight   hidden
""")

GQA = parts("""
    self_attn.q_proj.weight   heads*head_dim      hidden
    self_attn.k_proj.weight   kv_heads*head_dim   hidden
    self_attn.v_proj.weight   kv_heads*v_dim      hidden
    self_attn.o_proj.weight   hidden              heads*v_dim
""")

QKV_BIAS = parts("""
    self_attn.q_proj.bias   heads*head_dim      if attention_bias
    self_attn.k_proj.bias   kv_heads*head_dim   if attention_bias
    self_attn.v_proj.bias   kv_heads*v_dim      if attention_bias
""")

QK_NORM = parts("""
    self_attn.q_norm.weight   head_dim
    self_attn.k_norm.weight   head_dim
""")

# Qwen3-Next and Qwen3.5: q_proj carries an output gate, interleaved per head.
GATED_GQA = parts("""
    self_attn.q_proj.weight   2*heads*head_dim    hidden
    self_attn.k_proj.weight   kv_heads*head_dim   hidden
    self_attn.v_proj.weight   kv_heads*head_dim   hidden
    self_attn.o_proj.weight   hidden              heads*head_dim
    self_attn.q_norm.weight   head_dim
    self_attn.k_norm.weight   head_dim
""")

MLA = parts("""
    self_attn.q_a_proj.weight             q_rank                          hidden   if q_lora_rank
    self_attn.q_a_layernorm.weight        q_rank                          if q_lora_rank
    self_attn.q_b_proj.weight             heads*nope_dim+heads*rope_dim   q_rank   if q_lora_rank
    self_attn.q_proj.weight               heads*nope_dim+heads*rope_dim   hidden   if !q_lora_rank
    self_attn.kv_a_proj_with_mqa.weight   kv_rank+rope_dim                hidden
    self_attn.kv_a_layernorm.weight       kv_rank
    self_attn.kv_b_proj.weight            heads*nope_dim+heads*v_dim      kv_rank
    self_attn.o_proj.weight               hidden                          heads*v_dim
""")

INDEXER = parts("""
    self_attn.indexer.wq_b.weight           index_heads*index_dim   q_rank
    self_attn.indexer.wk.weight             index_dim               hidden
    self_attn.indexer.weights_proj.weight   index_heads             hidden
    self_attn.indexer.k_norm.weight         index_dim
    self_attn.indexer.k_norm.bias           index_dim
""")

DENSE_MLP = parts("""
    mlp.gate_proj.weight   intermediate   hidden
    mlp.up_proj.weight     intermediate   hidden
    mlp.down_proj.weight   hidden         intermediate
""")

EXPERTS = parts("""
    mlp.gate.weight                         experts     hidden
    mlp.experts.{expert}.gate_proj.weight   moe_width   hidden
    mlp.experts.{expert}.up_proj.weight     moe_width   hidden
    mlp.experts.{expert}.down_proj.weight   hidden      moe_width
""")

SHARED_EXPERTS = parts("""
    mlp.shared_experts.gate_proj.weight   shared_width   hidden
    mlp.shared_experts.up_proj.weight     shared_width   hidden
    mlp.shared_experts.down_proj.weight   hidden         shared_width
""")

# Routing by sigmoid scores with a learned correction (DeepSeek-V3 and its relatives).
SIGMOID_MOE = EXPERTS + SHARED_EXPERTS + parts("mlp.gate.e_score_correction_bias experts")

QWEN_MOE = EXPERTS + parts("""
    mlp.shared_expert.gate_proj.weight   shared_width   hidden
    mlp.shared_expert.up_proj.weight     shared_width   hidden
    mlp.shared_expert.down_proj.weight   hidden         shared_width
    mlp.shared_expert_gate.weight        1              hidden
""")

# Hyper-connections of DeepSeek-V4 and GLM-5.3-Flash: how a layer reads and writes several streams.
HYPER = parts("""
    hc_attn_fn      2*hc+hc*hc   hc*hidden
    hc_ffn_fn       2*hc+hc*hc   hc*hidden
    hc_attn_base    2*hc+hc*hc
    hc_ffn_base     2*hc+hc*hc
    hc_attn_scale   3
    hc_ffn_scale    3
""")


def dense_then_sparse(fields: Fields, layer: int, num_dense: int) -> str:
    """What `mlp_layer_types` calls a layer's MLP; the first ones are dense where it is absent."""
    feeds = fields.get("mlp_layer_types")
    if isinstance(feeds, list) and layer < len(feeds):
        return str(feeds[layer])
    first = int(fields.get("first_k_dense_replace") or num_dense)
    return "dense" if layer < first else "sparse"
