"""How llama.cpp spells the trunks that the engine runs: names, value changes, configs.

Facts are those of llama.cpp's converter (conversion/ of v0.5.0). A layer has the names of its
head's block, where the family has one; `archs.py` has those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.checkpoint.source import TensorSource
from headstart.heads.formats.gguf.arch_names import (
    CORRECTION,
    DENSE,
    EXPERTS,
    FFN_NORM,
    GQA,
    INDEXER,
    INPUT_NORM,
    MLA,
    POST_NORM,
    QWEN_MOE,
    SHARED,
    SIGMOID_MOE,
    names,
)
from headstart.heads.formats.gguf.delta_nets import joined_inputs, tiled_values
from headstart.heads.formats.gguf.model import GgufModel
from headstart.heads.formats.gguf.trunk_configs import (
    ConfigOf,
    ernie_config,
    glm_config,
    hybrid_config,
    latent_config,
    llama_config,
    mimo_config,
    qwen_config,
    sparse_config,
    step_config,
)

Tensors = Mapping[str, TensorSource]
# some tensors of a layer under published names; those that it has read are left out of the rest
Change = Callable[[Tensors, Mapping[str, Any]], tuple[dict[str, TensorSource], set[str]]]


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """One architecture of llama.cpp, as it spells the trunks of one model type."""

    model_type: str
    config: ConfigOf
    names: Mapping[str, str]  # below `layers.N.` -> below `blk.N.`
    shifts_norms: bool = False  # every norm is stored as 1 + w
    kv_b: str = ""  # the projection that is stored as attn_k_b (transposed) and attn_v_b
    is_paired: bool = False  # rows of q and k are stored as pairs instead of halves
    change: Change | None = None  # what more than a name is different
    # the model type where the name is that of several
    chosen: Callable[[GgufModel], str] | None = None


def _layer(*tables: str) -> dict[str, str]:
    """Names of the pieces that heads have, too, as a layer of the trunk has them."""
    return {ours.removeprefix("block."): theirs for ours, theirs in names(*tables).items()}


_KV_B = "self_attn.kv_b_proj.weight"
_DELTA = """
    linear_attn.norm       ssm_norm
    linear_attn.out_proj   ssm_out
"""
_STEP_MOE = """
    moe.gate                  ffn_gate_inp
    moe.router_bias           exp_probs_b.bias
    moe.gate_proj             ffn_gate_exps
    moe.up_proj               ffn_up_exps
    moe.down_proj             ffn_down_exps
    share_expert.gate_proj    ffn_gate_shexp
    share_expert.up_proj      ffn_up_shexp
    share_expert.down_proj    ffn_down_shexp
"""


def _deepseek_or_glm(model: GgufModel) -> str:
    """deepseek2 is the name of both; GLM-4.7-Flash has a head or GLM's tokenizer."""
    pre = model.fields.get("tokenizer.ggml.pre")
    is_glm = (pre is not None and pre.value == "glm4") or model.count("nextn_predict_layers")
    return "glm4_moe_lite" if is_glm else "deepseek_v3"


def _hybrid(model_type: str, feed: str, change: Change) -> Trunk:
    return Trunk(
        model_type=model_type,
        config=hybrid_config,
        names=_layer(INPUT_NORM, POST_NORM, GQA, _DELTA, DENSE, feed),
        shifts_norms=True,
        change=change,
    )


# architecture of llama.cpp -> the trunk
TRUNKS: Mapping[str, Trunk] = {
    "llama": Trunk(
        model_type="llama",
        config=llama_config,
        names=_layer(INPUT_NORM, FFN_NORM, GQA, DENSE),
        is_paired=True,
    ),
    "qwen2": Trunk(
        model_type="qwen2",
        config=qwen_config,
        names=_layer(INPUT_NORM, FFN_NORM, GQA, DENSE),
    ),
    "qwen3": Trunk(
        model_type="qwen3",
        config=qwen_config,
        names=_layer(INPUT_NORM, FFN_NORM, GQA, DENSE),
    ),
    "qwen3next": _hybrid("qwen3_next", QWEN_MOE, joined_inputs),
    "qwen35": _hybrid("qwen3_5_text", "", tiled_values),
    "qwen35moe": _hybrid("qwen3_5_moe_text", QWEN_MOE, tiled_values),
    "glm4moe": Trunk(
        model_type="glm4_moe",
        config=glm_config,
        names=_layer(INPUT_NORM, POST_NORM, GQA, DENSE, SIGMOID_MOE),
    ),
    "deepseek2": Trunk(
        model_type="deepseek_v3",
        config=latent_config,
        names=_layer(INPUT_NORM, FFN_NORM, MLA, DENSE, SIGMOID_MOE),
        kv_b=_KV_B,
        chosen=_deepseek_or_glm,
    ),
    "deepseek32": Trunk(
        model_type="deepseek_v32",
        config=sparse_config,
        names=_layer(INPUT_NORM, FFN_NORM, MLA, INDEXER, DENSE, SIGMOID_MOE),
        kv_b=_KV_B,
    ),
    "glm-dsa": Trunk(
        model_type="glm_moe_dsa",
        config=sparse_config,
        names=_layer(INPUT_NORM, FFN_NORM, MLA, INDEXER, DENSE, SIGMOID_MOE),
        kv_b=_KV_B,
    ),
    "ernie4_5-moe": Trunk(
        model_type="ernie4_5_moe",
        config=ernie_config,
        names=_layer(
            INPUT_NORM, FFN_NORM, GQA, DENSE, EXPERTS, SHARED,
            "mlp.moe_statics.e_score_correction_bias exp_probs_b.bias",
        ),
    ),
    "mimo2": Trunk(
        model_type="mimo_v2_flash",
        config=mimo_config,
        names=_layer(
            INPUT_NORM, FFN_NORM, GQA, DENSE, EXPERTS, CORRECTION,
            "self_attn.attention_sink_bias attn_sinks.weight",
        ),
    ),
    "step35": Trunk(
        model_type="step3p5",
        config=step_config,
        names=_layer(
            INPUT_NORM, FFN_NORM, GQA, DENSE, _STEP_MOE, "self_attn.g_proj attn_gate",
        ),
        shifts_norms=True,
    ),
}  # fmt: skip
