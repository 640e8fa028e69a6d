"""dots3-note: an appended dense layer with sliding-window MLA and an embedding of its own."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Part, parts
from headstart.families.blocks import DENSE_MLP, MLA, NORMS, ROLES
from headstart.families.dims import Fields
from headstart.families.keymaps import appended_layer

_LAYER = NORMS + MLA + DENSE_MLP + parts("self_attn.k_rope_only_layernorm.weight rope_dim")
_HEAD_GATE = parts("self_attn.g_proj.weight heads hidden")
_CHANNEL_GATE = parts("self_attn.g_proj.weight heads*v_dim hidden")


def _block(fields: Fields) -> tuple[Part, ...]:
    if "full_attention" in str(fields.get("mtp_layer_types")):
        return ()  # then the geometry below does not hold
    gate = _HEAD_GATE if fields.get("swa_attention_gate_type") == "headwise" else _CHANNEL_GATE
    return _LAYER + gate


FAMILY = Family(
    name="dots3_note",
    title="dots3-note",
    model_types=("dots3_note",),
    architectures=(
        "Dots3NoteForCausalLM",
        "Dots3NoteForConditionalGeneration",
        "Dots3NoteTextForCausalLM",
    ),
    keys=appended_layer(embed="model.mtp.embed_tokens"),
    layout=HeadLayout(shares=("lm_head",), deviations={"vllm": {"zero_embed_at_position_0": True}}),
    head=ROLES + parts("embed_tokens.weight vocab hidden"),
    block=_block,
    # The head slides (mtp_layer_types), and sliding layers have a geometry of their own.
    head_fields={
        "num_attention_heads": "swa_num_attention_heads",
        "q_lora_rank": "swa_q_lora_rank",
        "kv_lora_rank": "swa_kv_lora_rank",
        "qk_nope_head_dim": "swa_qk_nope_head_dim",
        "qk_rope_head_dim": "swa_qk_rope_head_dim",
        "v_head_dim": "swa_v_head_dim",
    },
    kv_elements="kv_rank+rope_dim",
    looked_up_as={"vllm": "model.layers.{layer}."},
    # configs need no count: engines take one module where there is none
    count_field=None,
    served={"vllm": "0.28.0rc1", "sglang": "0.5.19"},
    notes=(
        "the embedding of the head is trained, not a copy: it must be kept",
        "the fusion projection may be FP8",
    ),
)
