"""GigaChat 3.5: chained modules appended as layers, with norms that may have gates of their own."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Part, Trunk, parts
from headstart.families.blocks import DENSE_MLP, MLA, ROLES, SIGMOID_MOE
from headstart.families.deepseek import dense_then_moe
from headstart.families.dims import Fields
from headstart.families.keymaps import appended_layer

_GATE_RANK = 16
_BEFORE = ("input_layernorm", "post_attention_layernorm")
_BEHIND = ("post_self_attn_layernorm", "post_feedforward_layernorm")
_GATED_OUTPUT = parts("self_attn.gate_proj.weight heads*v_dim hidden if use_attention_gate")


def _norms(fields: Fields) -> tuple[Part, ...]:
    """Before attention and MLP, behind them, or both (`layernorm_type`)."""
    kind = fields.get("layernorm_type") or "pre"
    names = {"pre": _BEFORE, "post": _BEHIND}.get(str(kind), _BEFORE + _BEHIND)
    return tuple(Part(f"{name}.weight", ("hidden",)) for name in names)


def _has_gates(fields: Fields) -> bool:
    return "GatedNorm" in str(fields.get("norm_type"))


def _gates(table: tuple[Part, ...]) -> tuple[Part, ...]:
    """Two small matrices for each norm of a table."""
    norms = [part for part in table if part.name.endswith("norm.weight")]
    return tuple(
        Part(f"{part.name.removesuffix('weight')}{name}.weight", shape, part.when)
        for part in norms
        for name, shape in (
            ("gate_up_projection", (str(_GATE_RANK), *part.shape)),
            ("gate_down_projection", (*part.shape, str(_GATE_RANK))),
        )
    )


def _with_gates(fields: Fields, table: tuple[Part, ...]) -> tuple[Part, ...]:
    return table + _gates(table) if _has_gates(fields) else table


def _layer(fields: Fields, feed: tuple[Part, ...]) -> tuple[Part, ...]:
    return _with_gates(fields, _norms(fields) + MLA + _GATED_OUTPUT + feed)


FAMILY = Family(
    name="gigachat3_5",
    title="GigaChat 3.5 (432B-A28B)",
    model_types=("gigachat3_5", "gigachat35"),
    architectures=("GigaChat35ForCausalLM",),
    default_modules=2,
    keys=appended_layer(),
    layout=HeadLayout(recycled_hidden="before_out_norm", topology="chained"),
    centred_norms=lambda fields: "ZeroCentered" in str(fields.get("norm_type")),
    head=ROLES,
    head_of=lambda fields: _with_gates(fields, ROLES),
    block=lambda fields: _layer(fields, SIGMOID_MOE),
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(
        kinds_of=lambda fields: {
            "dense": _layer(fields, DENSE_MLP),
            "moe": _layer(fields, SIGMOID_MOE),
        },
        kind_of=dense_then_moe,
    ),
    kv_elements="kv_rank+rope_dim",
    looked_up_as={"sglang": "model.decoder."},
    served={"sglang": "0.5.21 one draft runner per module"},
    is_complete=True,
    lacks="gated norms, norms behind attention and MLP, and its recurrent layers",
    notes=(
        "norm_type: plain, 1 + w, or with a gate of two small matrices beside each norm",
        "a variant for reasoning declares three modules",
        "latent norms are scaled by engines where use_mla_scaling_factor; they are stored raw",
        "GigaChat 3 (702B, 10B) is of type deepseek_v3",
    ),
)
