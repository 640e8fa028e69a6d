"""Inkling: up to eight chained modules, hidden state first, one norm shared by all of them."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.keymaps import mtp_layers

FAMILY = Family(
    name="inkling",
    title="Inkling",
    model_types=("inkling_mm_model", "inkling_model"),
    architectures=("InklingForConditionalGeneration", "InklingForCausalLM"),
    count_field="mtp_config.num_nextn_predict_layers",
    default_modules=8,
    keys=mtp_layers(
        "model.mtp.layers.",
        embed_norm="embed_norm",
        hidden_norm="hidden_norm",
        fuse="input_proj",
        out_norm="",
        block="transformer_block.",
        shared={"model.mtp.chain_norm.{rest}": "shared.chain_norm.{rest}"},
    ),
    layout=HeadLayout(fuse_order="hidden_first", topology="chained", out_norm="shared"),
    head=parts("""
        embed_norm.weight          hidden
        hidden_norm.weight         hidden
        fuse.weight                hidden   2*hidden
        shared.chain_norm.weight   hidden   if chain_hidden_post_norm
    """),
    # No block table: the widths of the relative-position and convolution tensors are not known.
    head_fields={"chain_hidden_post_norm": "mtp_config.chain_hidden_post_norm"},
    trunk=Trunk(
        prefixes=("model.llm.",),
        embed="embed.weight",
        lm_heads=("model.llm.unembed.weight",),
        extras=parts("embed_norm.weight hidden if use_embed_norm"),
    ),
    served={"vllm": "0.26.0", "sglang": "0.5.16"},
    lacks="short convolutions in attention",
    notes=(
        "embeddings pass the trunk's embed_norm before the head's; skipping it costs acceptance",
        "without chain_hidden_post_norm there is no norm between block and LM head",
        "logits are divided by logits_mup_width_multiplier, the chained hidden state is not",
        "mtp_config.local_layer_ids lists the depths with a sliding window",
        "the head is BF16 in every release and lies in mtp.safetensors",
    ),
)
