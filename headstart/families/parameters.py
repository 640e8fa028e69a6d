"""Published tensors of the engine's layer parameters, as most families call them, and of what
joins several residual streams behind the layers.

One parameter may hold several tensors, whose rows follow one another: q, k and v, or gate and up.
A family that calls some differently says so in `Runtime.parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")


def parameters(table: str) -> dict[str, tuple[str, ...]]:
    """Parse lines of `parameter  tensor ...`, where `{gate,up}_proj` stands for two names."""
    lines = (line.split() for line in table.split("\n"))
    return {
        words[0]: tuple(name for word in words[1:] for name in _expanded(word))
        for words in lines
        if words
    }


def _expanded(word: str) -> list[str]:
    found = _CHOICE.search(word)
    if found is None:
        return [word]
    return [word[: found.start()] + each + word[found.end() :] for each in found[1].split(",")]


USUAL = parameters("""
    attention_norm.weight             input_layernorm.weight
    attention.qkv.weight              self_attn.{q,k,v}_proj.weight
    attention.qkv.bias                self_attn.{q,k,v}_proj.bias
    attention.o.weight                self_attn.o_proj.weight
    attention.o.bias                  self_attn.o_proj.bias
    attention.q_norm.weight           self_attn.q_norm.weight
    attention.k_norm.weight           self_attn.k_norm.weight
    attention.head_gate.weight        self_attn.g_proj.weight
    attention.sinks                   self_attn.attention_sink_bias
    attention.gate.weight             self_attn.gate_proj.weight
    attention.compress.weight         self_attn.{q_a_proj,kv_a_proj_with_mqa}.weight
    attention.q_latent_norm.weight    self_attn.q_a_layernorm.weight
    attention.q_up.weight             self_attn.q_b_proj.weight
    attention.kv_latent_norm.weight   self_attn.kv_a_layernorm.weight
    attention.kv_up                   self_attn.kv_b_proj.weight
    attention.indexer.q_up.weight     self_attn.indexer.wq_b.weight
    attention.indexer.k.weight        self_attn.indexer.wk.weight
    attention.indexer.k_norm_weight   self_attn.indexer.k_norm.weight
    attention.indexer.k_norm_bias     self_attn.indexer.k_norm.bias
    attention.indexer.weights.weight  self_attn.indexer.weights_proj.weight
    attention.indexer.pool_gate       self_attn.indexer.index_kpool_compress_gate
    attention.indexer.pool_bias       self_attn.indexer.index_kpool_compress_ape
    attention.indexer.qk.weight       self_attn.indexer.index_qk_proj.weight
    attention.indexer.q_norm.weight   self_attn.indexer.q_layernorm.weight
    attention.indexer.k_norm.weight   self_attn.indexer.k_layernorm.weight
    attention.inputs.weight           linear_attn.in_proj_{qkv,z,b,a}.weight
    attention.conv                    linear_attn.conv1d.weight
    attention.q_conv                  self_attn.q_conv1d.weight
    attention.k_conv                  self_attn.k_conv1d.weight
    attention.v_conv                  self_attn.v_conv1d.weight
    attention.decay_up.weight         self_attn.f_b_proj.weight
    attention.gate_up.weight          self_attn.g_b_proj.weight
    attention.a_log                   linear_attn.A_log
    attention.dt_bias                 linear_attn.dt_bias
    attention.norm                    linear_attn.norm.weight
    attention.out.weight              linear_attn.out_proj.weight
    attention_streams.shares.weight   hc_attn_fn
    attention_streams.shares.base     hc_attn_base
    attention_streams.shares.scale    hc_attn_scale
    mlp_streams.shares.weight         hc_ffn_fn
    mlp_streams.shares.base           hc_ffn_base
    mlp_streams.shares.scale          hc_ffn_scale
    ngrams.table                      ple.ple_embedding.ngram_embedding.shard_{shard}.weight
    ngrams.key.weight                 ple.key_proj.weight
    ngrams.value.weight               ple.value_proj.weight
    ngrams.key_norm.weight            ple.norm_key.weight
    ngrams.query_norm.weight          ple.norm_query.weight
    ngrams.value_norm.weight          ple.norm_conv.weight
    ngrams.conv                       ple.conv1d.weight
    mlp_norm.weight                   post_attention_layernorm.weight
    mlp.gate_up.weight                mlp.{gate,up}_proj.weight
    mlp.gate_up.bias                  mlp.{gate,up}_proj.bias
    mlp.down.weight                   mlp.down_proj.weight
    mlp.down.bias                     mlp.down_proj.bias
    mlp.router.weight                 mlp.gate.weight
    mlp.router.correction             mlp.gate.e_score_correction_bias
    mlp.experts.gate_up.weight        mlp.experts.{expert}.{gate,up}_proj.weight
    mlp.experts.down.weight           mlp.experts.{expert}.down_proj.weight
    mlp.shared.gate_up.weight         mlp.shared_experts.{gate,up}_proj.weight
    mlp.shared.down.weight            mlp.shared_experts.down_proj.weight
    mlp.shared_gate.weight            mlp.shared_expert_gate.weight
    attention_streams.gates.norm.weight   attn_hyper_connection.hc_norm.weight
    attention_streams.gates.down.weight   attn_hyper_connection.input_mix_weight_down.weight
    attention_streams.gates.up.weight     attn_hyper_connection.input_mix_weight_up.weight
    attention_streams.inject.weight       attn_hyper_connection.block_inject_weight.weight
    mlp_streams.gates.norm.weight         mlp_hyper_connection.hc_norm.weight
    mlp_streams.gates.down.weight         mlp_hyper_connection.input_mix_weight_down.weight
    mlp_streams.gates.up.weight           mlp_hyper_connection.input_mix_weight_up.weight
    mlp_streams.inject.weight             mlp_hyper_connection.block_inject_weight.weight
    final_norm.gates.norm.weight          hyper_connection_mixer.hc_norm.weight
    final_norm.gates.down.weight          hyper_connection_mixer.input_mix_weight_down.weight
    final_norm.gates.up.weight            hyper_connection_mixer.input_mix_weight_up.weight
    hc_head.gates.norm.weight             hc_head.hc_norm.weight
    hc_head.gates.down.weight             hc_head.input_mix_weight_down.weight
    hc_head.gates.up.weight               hc_head.input_mix_weight_up.weight
    final_norm.join.weight            hc_head_fn
    final_norm.join.base              hc_head_base
    final_norm.join.scale             hc_head_scale
    hc_head.join.weight               hc_head.fn
    hc_head.join.base                 hc_head.base
    hc_head.join.scale                hc_head.scale
    hc_head.norm.weight               out_norm.weight
""")


# Parameters of layers that are called differently wherever they exist.
UNUSUAL = frozenset({
    "attention.conv_bias", "attention.skip", "mlp.up.weight", "mlp.experts.up.weight",
    "mlp.shared.up.weight", "mlp.latent_in.weight", "mlp.latent_out.weight",
    "attention_out_norm.weight", "mlp_out_norm.weight", "attention.kv_norm.weight",
    "attention.o_groups", "attention.windows.kv.weight", "attention.windows.bias",
    "attention.windows.norm.weight", "attention.indexer.windows.kv.weight",
    "attention.indexer.windows.bias", "attention.indexer.windows.norm.weight",
    "mlp.router.by_token",
})  # fmt: skip


def held_by(tensors: Collection[str], own: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """Our parameters that a layer with these published tensors has; `own` as in `Runtime`."""
    names = {**USUAL, **own}
    return frozenset(ours for ours, theirs in names.items() if theirs[0] in tensors)
