"""Step-3.5, 3.7 and 5: chained modules, each with a trained LM head of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headstart.errors import UnsupportedFamily
from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import DENSE_MLP, NORMS, QK_NORM, ROLES
from headstart.families.cautions import Caution
from headstart.families.dims import Fields, layer_numbers
from headstart.families.keymaps import appended_layer
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime

_ATTENTION = QK_NORM + parts("""
    self_attn.q_proj.weight   heads*head_dim      hidden
    self_attn.k_proj.weight   kv_heads*head_dim   hidden
    self_attn.v_proj.weight   kv_heads*head_dim   hidden
    self_attn.o_proj.weight   hidden              heads*head_dim
    self_attn.g_proj.weight   heads               hidden            if use_head_wise_attn_gate
""")
_SLIDING = parts("""
    self_attn.q_norm.weight   swa_head_dim
    self_attn.k_norm.weight   swa_head_dim
    self_attn.q_proj.weight   swa_heads*swa_head_dim      hidden
    self_attn.k_proj.weight   swa_kv_heads*swa_head_dim   hidden
    self_attn.v_proj.weight   swa_kv_heads*swa_head_dim   hidden
    self_attn.o_proj.weight   hidden                          swa_heads*swa_head_dim
    self_attn.g_proj.weight   swa_heads   hidden            if use_head_wise_attn_gate
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
    moe = layer_numbers(listed) if listed else None
    feed = "moe" if (layer in moe if moe is not None else layer > 0) else "dense"
    return f"sliding_{feed}" if _slides(fields, layer) else feed


_RENAMED = {
    "num_attention_groups": "num_key_value_heads",
    "moe_top_k": "num_experts_per_tok",
    "moe_router_activation": "scoring_func",
    "moe_router_scaling_factor": "routed_scaling_factor",
    "norm_expert_weight": "norm_topk_prob",
}


def _normalised(fields: Fields) -> Fields:
    """Rotation is given layer by layer, and the geometry of sliding layers apart."""
    kinds = fields.get("layer_types") or []
    of_modules = set(kinds[int(fields.get("num_hidden_layers") or 0) :])
    if len(of_modules) > 1:
        raise UnsupportedFamily(
            f"the head's modules are {' and '.join(sorted(of_modules))}; the engine runs heads "
            "whose modules are all of one kind, as those of all releases are."
        )
    found: dict[str, Any] = {}
    given = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}
    for theirs, usual in given.items():
        value = fields.get(theirs)
        if isinstance(value, list):
            by_kind = dict(zip(reversed(kinds), reversed(value), strict=False))
            found[usual] = by_kind.get("full_attention")
            found[f"swa_{usual}"] = by_kind.get("sliding_attention")
        else:
            found[f"swa_{usual}"] = value
    other = fields.get("attention_other_setting") or {}
    for name in ("num_attention_heads", "num_attention_groups", "head_dim"):
        usual = _RENAMED.get(name, name)
        found[f"swa_{usual}"] = other.get(name) or fields.get(usual)
    found["swa_v_head_dim"] = found["swa_head_dim"]
    found["swa_window"] = fields.get("sliding_window")
    return found


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
    served={
        "vllm": "0.15.1",
        "sglang": "0.5.9 one draft runner per module",
        "trtllm": "1.3.0rc20",
        "llamacpp": "b9480 all three modules from b9745",
    },
    variants={"vllm": {"step3p7": "0.23.0"}, "sglang": {"step3p7": "0.5.13"}},
    is_complete=True,
    runtime=Runtime(
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "max_position_embeddings": 128000,
        },
        renamed=_RENAMED,
        normalise=_normalised,
        partial_rotary=True,
        parameters=parameters("""
            mlp.router.weight            moe.gate.weight
            mlp.router.correction        moe.router_bias
            mlp.experts.gate_up.weight   moe.{gate,up}_proj.weight
            mlp.experts.down.weight      moe.down_proj.weight
            mlp.shared.gate_up.weight    share_expert.{gate,up}_proj.weight
            mlp.shared.down.weight       share_expert.down_proj.weight
        """),
    ),
    cautions=(
        Caution(
            engine="vllm",
            before="0.23.0",
            text="the first module drafts every token, as there is no proposer that runs each; "
            "use 0.23.0 or later",
        ),
        *(
            Caution(
                engine="vllm",
                since=since,
                before=before,
                text="the model's LM head takes the place of the modules' trained ones, with "
                f"which hardly a draft is accepted; use {before} or later",
            )
            for since, before in (("0.16.0", "0.23.0"), ("0.27.0", "0.28.0rc2"))
        ),
        Caution(
            engine="vllm",
            since="0.19.0",
            concerns=lambda fields: bool(
                fields.get("layer_types") and fields.get("attention_other_setting")
            ),
            text="it does not start with drafts (IndexError: list index out of range), as "
            "layer_types is cut to the trunk's layers and read for the head's; "
            "vllm-project/vllm#40000, still so in 0.32.0",
        ),
    ),
    notes=("per-layer config lists have one trailing entry for each module",),
)

STEP5 = Family(
    name="step5",
    title="Step-5",
    model_types=("step5", "step5_vl"),
    architectures=("Step5ForCausalLM", "Step5ForConditionalGeneration"),
    keys=FAMILY.keys,
    layout=replace(FAMILY.layout, zero_centred_norms=False),
    centred_norms=lambda fields: bool(fields.get("zero_centered")),
    # No block table: which tensors attention has there follows from sparse_config.
    head=FAMILY.head,
    trunk=Trunk(
        prefixes=FAMILY.trunk.prefixes,
        lm_heads=FAMILY.trunk.lm_heads,
        beside=FAMILY.trunk.beside,
    ),
    looked_up_as={"vllm": "model.layers.{layer}.mtp_block."},
    served={"vllm": "0.33.0"},
    lacks="grouped attention to a choice of compressed blocks of tokens (sparse_config)",
    notes=(
        "names and contract as vLLM 0.33.0 loads and computes them; no release was seen",
        "modules' blocks must be dense there",
    ),
)
