"""Names of tensors in GGUF beside ours, in pieces that architectures share."""

from __future__ import annotations


def names(*tables: str) -> dict[str, str]:
    """Lines of `our name` `GGUF name`, below `modules.{i}.` and `blk.{L+i}.`."""
    pairs = [line.split() for table in tables for line in table.split("\n") if line.strip()]
    return {ours: theirs for ours, theirs in pairs}


ROLES = """
    fuse           nextn.eh_proj
    embed_norm     nextn.enorm
    hidden_norm    nextn.hnorm
    out_norm       nextn.shared_head_norm
    embed_tokens   nextn.embed_tokens
    lm_head        nextn.shared_head_head
"""
LAYER_OUT_NORM = "out_norm layer_output_norm"
INPUT_NORM = "block.input_layernorm attn_norm"
FFN_NORM = "block.post_attention_layernorm ffn_norm"
POST_NORM = "block.post_attention_layernorm post_attention_norm"
GQA = """
    block.self_attn.q_proj   attn_q
    block.self_attn.k_proj   attn_k
    block.self_attn.v_proj   attn_v
    block.self_attn.o_proj   attn_output
    block.self_attn.q_norm   attn_q_norm
    block.self_attn.k_norm   attn_k_norm
"""
LATENT = """
    {at}.q_a_proj             attn_q_a
    {at}.q_a_layernorm        attn_q_a_norm
    {at}.q_b_proj             attn_q_b
    {at}.q_proj               attn_q
    {at}.kv_a_proj_with_mqa   attn_kv_a_mqa
    {at}.kv_a_layernorm       attn_kv_a_norm
"""
MLA = LATENT.format(at="block.self_attn") + "block.self_attn.o_proj attn_output"
INDEXER = """
    block.self_attn.indexer.wq_b           indexer.attn_q_b
    block.self_attn.indexer.wk             indexer.attn_k
    block.self_attn.indexer.weights_proj   indexer.proj
    block.self_attn.indexer.k_norm         indexer.k_norm
"""
DENSE = """
    block.mlp.gate_proj   ffn_gate
    block.mlp.up_proj     ffn_up
    block.mlp.down_proj   ffn_down
"""
STACKS = """
    block.mlp.experts.gate_proj   ffn_gate_exps
    block.mlp.experts.up_proj     ffn_up_exps
    block.mlp.experts.down_proj   ffn_down_exps
"""
EXPERTS = STACKS + "block.mlp.gate ffn_gate_inp"
SHARED = """
    block.mlp.shared_experts.gate_proj   ffn_gate_shexp
    block.mlp.shared_experts.up_proj     ffn_up_shexp
    block.mlp.shared_experts.down_proj   ffn_down_shexp
"""
CORRECTION = "block.mlp.gate.e_score_correction_bias exp_probs_b.bias"
SIGMOID_MOE = f"{EXPERTS}{SHARED}{CORRECTION}"
QWEN_MOE = (
    EXPERTS
    + """
    block.mlp.shared_expert.gate_proj   ffn_gate_shexp
    block.mlp.shared_expert.up_proj     ffn_up_shexp
    block.mlp.shared_expert.down_proj   ffn_down_shexp
    block.mlp.shared_expert_gate        ffn_gate_inp_shexp
"""
)
