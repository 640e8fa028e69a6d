"""Step-3.5 and 3.7: three chained modules, each with a trained LM head of its own."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import DENSE_MLP, NORMS, QK_NORM, ROLES
from headstart.families.dims import Fields
from headstart.families.keymaps import appended_layer

_ATTENTION = QK_NORM + parts("""
    self_attn.q_proj.weight   heads*head_dim      hidden
    self_attn.k_proj.weight   kv_heads*head_dim   hidden
    self_attn.v_proj.weight   kv_heads*head_dim   hidden
    self_attn.o_proj.weight   hidden              heads*head_dim
    self_attn.g_proj.weight   heads               hidden            if use_head_wise_attn_gate
""")
_SLIDING = parts("""
    self_attn.q_norm.weight   other_head_dim
    self_attn.k_norm.weight   other_head_dim
    self_attn.q_proj.weight   other_heads*other_head_dim      hidden
    self_attn.k_proj.weight   other_kv_heads*other_head_dim   hidden
    self_attn.v_proj.weight   other_kv_heads*other_head_dim   hidden
    self_attn.o_proj.weight   hidden                          other_heads*other_head_dim
    self_attn.g_proj.weight   other_heads   hidden            if use_head_wise_attn_gate
""")
_BLOCK = NORMS + _ATTENTION + DENSE_MLP
_EXPERTS = parts("""
    moe.gate.weight                 experts        hidden
    moe.router_bias                 experts
    moe.gate_proj.weight            experts        moe_width      hidden
    moe.up_proj.weight              experts        moe_width      hidden
    moe.down_proj.weight            experts        hidden         moe_width
    share_expert.gate_proj.weight   shared_width   hidden
    share_expert.up_proj.weight     shared_width   hidden
    share_expert.down_proj.weight   hidden         shared_width
""")


def _slides(fields: Fields, layer: int) -> bool:
    kinds = fields.get("layer_types")
    return isinstance(kinds, list) and kinds[layer : layer + 1] == ["sliding_attention"]


def _kind(fields: Fields, layer: int) -> str:
    listed = fields.get("moe_layers_enum")
    moe = {int(i) for i in str(listed).split(",") if i.strip().isdigit()} if listed else None
    feed = "moe" if (layer in moe if moe is not None else layer > 0) else "dense"
    return f"sliding_{feed}" if _slides(fields, layer) else feed


FAMILY = Family(
    name="step3p5",
    title="Step-3.5-Flash, Step-3.7-Flash",
    model_types=("step3p5", "step3p7"),
    architectures=("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    default_modules=3,
    keys=appended_layer(
        roots=("model.", "model.language_model.", "language_model.model."),
        layers="layers.",
        out_norm="transformer.shared_head.norm",
        lm_head="transformer.shared_head.output",
    ),
    layout=HeadLayout(
        zero_centred_norms=True,
        trunk_hidden="before_final_norm",
        recycled_hidden="before_out_norm",
        topology="chained",
        shares=("embed_tokens",),
    ),
    head=ROLES + parts("lm_head.weight vocab hidden"),
    block=lambda fields: _BLOCK,
    # Head layers use sliding attention, whose geometry the config keeps apart.
    head_fields={
        "num_attention_heads": "attention_other_setting.num_attention_heads",
        "num_attention_groups": "attention_other_setting.num_attention_groups",
        "head_dim": "attention_other_setting.head_dim",
    },
    block_kind="dense",
    trunk=Trunk(
        prefixes=("model.", "model.language_model.", "language_model.model."),
        lm_heads=("lm_head.weight", "language_model.lm_head.weight"),
        kinds={
            "dense": _BLOCK,
            "moe": NORMS + _ATTENTION + _EXPERTS,
            "sliding_dense": NORMS + _SLIDING + DENSE_MLP,
            "sliding_moe": NORMS + _SLIDING + _EXPERTS,
        },
        kind_of=_kind,
        slides=_slides,
        beside=("vision_model.", "vit_large_projector."),
    ),
    looked_up_as={"vllm": "model.layers.{layer}.mtp_block.", "sglang": "model.mtp_block."},
    is_complete=True,
    notes=("per-layer config lists have one trailing entry for each module",),
)
