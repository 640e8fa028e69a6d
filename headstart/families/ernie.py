"""ERNIE-4.5 MoE: a dense head block on a MoE trunk, flat names, no out norm."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import DENSE_MLP, EXPERTS, GQA, NORMS, SHARED_EXPERTS
from headstart.families.dims import Fields
from headstart.families.names import KeyMap
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime

_BLOCK = NORMS + GQA + DENSE_MLP
_MOE = (
    NORMS
    + GQA
    + EXPERTS
    + SHARED_EXPERTS
    + parts("mlp.moe_statics.e_score_correction_bias 1 experts")
)


def _kind(fields: Fields, layer: int) -> str:
    start = int(fields.get("moe_layer_start_index") or 0)
    end = fields.get("moe_layer_end_index")
    last = int(fields.get("num_hidden_layers") or 0) - 1 if end in (None, -1) else int(end)
    every = int(fields.get("moe_layer_interval") or 1)
    return "moe" if start <= layer <= last and (layer + 1) % every == 0 else "dense"


FAMILY = Family(
    name="ernie4_5_moe",
    title="ERNIE-4.5 MoE (21B-A3B)",
    model_types=("ernie4_5_moe",),
    architectures=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"),
    keys=KeyMap(
        {
            "model.mtp_emb_norm.{module}.{rest}": "modules.{module}.embed_norm.{rest}",
            "model.mtp_hidden_norm.{module}.{rest}": "modules.{module}.hidden_norm.{rest}",
            "model.mtp_linear_proj.{module}.{rest}": "modules.{module}.fuse.{rest}",
            "model.mtp_block.{module}.{rest}": "modules.{module}.block.{rest}",
        }
    ),
    layout=HeadLayout(
        recycled_hidden="before_out_norm",
        zero_embed_at_position_0=True,
        out_norm="none",
        deviations={"vllm": {"rotates_halves": True}},
    ),
    head=parts("""
        embed_norm.weight    hidden
        hidden_norm.weight   hidden
        fuse.weight          hidden 2*hidden
    """),
    block=lambda fields: _BLOCK,
    block_kind="dense",
    trunk=Trunk(kinds={"dense": _BLOCK, "moe": _MOE}, kind_of=_kind),
    looked_up_as={"vllm": "model.layers.{layer}.", "sglang": "model.mtp_block."},
    served={"vllm": "0.10.2 one module, reused for every draft", "sglang": "0.5.1"},
    is_complete=True,
    runtime=Runtime(
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "moe_layer_start_index": 1,
            "moe_norm_min": 1e-12,
            "moe_num_shared_experts": 2,
        },
        fixed={"rope_interleave": True},
        refused={"use_bias": "the engine computes ERNIE without biases, as all its releases are."},
        parameters=parameters("mlp.router.correction   mlp.moe_statics.e_score_correction_bias"),
    ),
    notes=("engines send the raw block output to the LM head; there is no norm tensor for it",),
)
