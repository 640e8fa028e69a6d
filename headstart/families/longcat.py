"""LongCat-Flash: a dense MLA head under `model.mtp.`, on a trunk whose layers are double."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, parts
from headstart.families.blocks import MLA, NORMS, ROLES
from headstart.families.keymaps import mtp_layers

_MLP = parts("""
    transformer_layer.mlp.gate_proj.weight   intermediate   hidden
    transformer_layer.mlp.up_proj.weight     intermediate   hidden
    transformer_layer.mlp.down_proj.weight   hidden         intermediate
""")
_BLOCK = NORMS + MLA + _MLP

FAMILY = Family(
    name="longcat_flash",
    title="LongCat-Flash",
    model_types=("longcat_flash", "longcat_flash_ngram"),
    architectures=("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"),
    keys=mtp_layers(
        "model.mtp.layers.",
        embed_norm="enorm.m",
        hidden_norm="hnorm.m",
        out_norm="",
        shared={
            "model.mtp.norm.{rest}": "modules.0.out_norm.{rest}",
            "model.mtp.embed_tokens.{rest}": "modules.0.embed_tokens.{rest}",
        },
    ),
    layout=HeadLayout(),
    head=ROLES,
    block=lambda fields: _BLOCK,
    head_fields={"intermediate_size": "ffn_hidden_size"},
    copies=("embed_tokens",),
    kv_elements="kv_rank+rope_dim",
    served={"vllm": "0.11.0", "sglang": "0.5.2"},
    variants={"vllm": {"longcat_flash_ngram": "0.26.0"}, "sglang": {"longcat_flash_ngram": None}},
    lacks="layers of two attentions with experts beside them",
    notes=(
        "engines apply mla_scale_q_lora and mla_scale_kv_lora to the latent norms after loading",
        "disable_quant_module with `mtp` in it means the head is not quantised",
        "vLLM numbers the draft layer 2 * num_hidden_layers, as trunk layers have two sub-layers",
    ),
)
