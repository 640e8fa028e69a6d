"""DeepSeek-V4: names without `model.`, several residual streams, two added fusion projections."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import HYPER
from headstart.families.cautions import Caution
from headstart.families.names import KeyMap

_BLOCK = HYPER + parts("""
    attn_norm.weight                     hidden
    ffn_norm.weight                      hidden
    attn.wq_a.weight                     q_rank             hidden
    attn.q_norm.weight                   q_rank
    attn.wq_b.weight                     heads*head_dim     q_rank
    attn.wkv.weight                      head_dim           hidden
    attn.kv_norm.weight                  head_dim
    attn.wo_a.weight                     o_groups*o_rank    heads_per_group*head_dim
    attn.wo_b.weight                     hidden             o_groups*o_rank
    attn.attn_sink                       heads
    ffn.gate.weight                      experts            hidden
    ffn.gate.bias                        experts
    ffn.experts.{expert}.w1.weight       moe_width          hidden
    ffn.experts.{expert}.w2.weight       hidden             moe_width
    ffn.experts.{expert}.w3.weight       moe_width          hidden
    ffn.shared_experts.w1.weight         shared_width       hidden
    ffn.shared_experts.w2.weight         hidden             shared_width
    ffn.shared_experts.w3.weight         shared_width       hidden
""")

FAMILY = Family(
    name="deepseek_v4",
    title="DeepSeek-V4 Flash, V4 Pro (original releases)",
    model_types=("deepseek_v4",),
    architectures=("DeepseekV4ForCausalLM",),
    keys=KeyMap(
        {
            "mtp.{module}.enorm.{rest}": "modules.{module}.embed_norm.{rest}",
            "mtp.{module}.hnorm.{rest}": "modules.{module}.hidden_norm.{rest}",
            "mtp.{module}.e_proj.{rest}": "modules.{module}.fuse_embed.{rest}",
            "mtp.{module}.h_proj.{rest}": "modules.{module}.fuse_hidden.{rest}",
            "mtp.{module}.norm.{rest}": "modules.{module}.out_norm.{rest}",
            "mtp.{module}.hc_head_{rest}": "modules.{module}.hc_head.{rest}",
            "mtp.{module}.head.{rest}": "modules.{module}.lm_head.{rest}",
            "mtp.{module}.emb.tok_emb.{rest}": "modules.{module}.embed_tokens.{rest}",
            "mtp.{module}.{rest}": "modules.{module}.block.{rest}",
        }
    ),
    layout=HeadLayout(
        fuse_order="summed",  # e_proj(e) + h_proj(h), added to every stream
        trunk_hidden="before_hc_head",
        recycled_hidden="streams",
        deviations={"vllm": {"zero_embed_at_position_0": True}},
    ),
    head=parts("""
        embed_norm.weight    hidden
        hidden_norm.weight   hidden
        fuse_embed.weight    hidden   hidden
        fuse_hidden.weight   hidden   hidden
        out_norm.weight      hidden
        hc_head.fn           hc       hc*hidden
        hc_head.base         hc
        hc_head.scale        1
    """),
    block=lambda fields: _BLOCK,
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(
        prefixes=("",),
        embed="embed.weight",
        lm_heads=("head.weight",),
        # Trunk layers may add a KV compressor, an indexer and hashed routing to this.
        kinds={"moe": _BLOCK},
        kind_of=lambda fields, layer: "moe",
        extras=parts("""
            hc_head_fn      hc   hc*hidden
            hc_head_base    hc
            hc_head_scale   1
        """),
    ),
    kv_elements="head_dim",  # one latent KV head
    looked_up_as={"vllm": "model.layers.{layer}."},
    also_asked_as={
        "fuse_embed": ("model.layers.{layer}.e_proj", "model.e_proj"),
        "fuse_hidden": ("model.layers.{layer}.h_proj", "model.h_proj"),
        "block.attn": ("model.decoder.self_attn",),  # SGLang
        "block.ffn": ("model.decoder.mlp",),
    },
    served={
        "vllm": "0.20.0",
        "sglang": "0.5.12",
        "trtllm": "1.3.0rc20 Blackwell GPUs only",
        "xllm": "0.10.0",
    },
    cautions=(
        Caution(
            engine="vllm",
            is_occasional=True,
            text="without copies of embedding and LM head inside the head (mtp.0.head, mtp.0.emb) "
            "it drafts with uninitialised ones (vllm-project/vllm#43456)",
        ),
    ),
    is_complete=True,
    is_quantized_by_layout=True,
    lacks="K/V that layers compress by different ratios, output projections in groups, experts "
    "chosen by hashed tokens, and a head whose streams are joined by weights of its own",
    notes=(
        "llama.cpp drafts with it from b10228 on",
        "re-releases with dspark_* config keys store a DSpark drafter under mtp.*, not a head",
        "scales are E8M0 beside FP4 experts: copied bit for bit",
        "the base release stores copies of embedding and LM head in the head (emb.tok_emb, head)",
    ),
)
