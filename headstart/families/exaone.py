"""K-EXAONE (EXAONE-MoE) and EXAONE-4.5: Qwen-style names, plain norms, windows beside layers that
see everything and do not rotate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import (
    DENSE_MLP,
    EXPERTS,
    GQA,
    NORMS,
    QK_NORM,
    ROLES,
    SHARED_EXPERTS,
    dense_then_sparse,
)
from headstart.families.cautions import Caution
from headstart.families.dims import Fields
from headstart.families.keymaps import qwen_style
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime

_POST_NORMS = parts("""
    post_attention_layernorm.weight     hidden
    post_feedforward_layernorm.weight   hidden
""")
_DENSE = NORMS + GQA + QK_NORM + DENSE_MLP
_MOE = (
    NORMS + GQA + QK_NORM + EXPERTS + SHARED_EXPERTS + parts("mlp.e_score_correction_bias experts")
)
_POST_NORM_BLOCK = _POST_NORMS + GQA + QK_NORM + DENSE_MLP
_SLIDING = "sliding_attention"


def _layer_types(fields: Fields) -> list[str]:
    """What each layer attends to, given or by a pattern such as LLLG; the last sees everything."""
    listed, layers = fields.get("layer_types"), int(fields.get("num_hidden_layers") or 0)
    if isinstance(listed, list):
        return [str(kind) for kind in listed]
    pattern = fields.get("sliding_window_pattern", 4)
    if not fields.get("sliding_window") or not pattern:
        return ["full_attention"] * layers
    letters = "L" * (pattern - 1) + "G" if isinstance(pattern, int) else str(pattern)
    is_local = [letters[layer % len(letters)] == "L" for layer in range(layers)]
    if is_local and not isinstance(pattern, int):
        is_local[-1] = False
    return [_SLIDING if local else "full_attention" for local in is_local]


def _head_type(fields: Fields) -> str:
    """As vLLM reads it: given apart, else that of the first layer."""
    listed = fields.get("mtp_layer_types")
    return str(listed[0]) if isinstance(listed, list) and listed else _layer_types(fields)[0]


def _rotates_in_new_releases_only(fields: Fields) -> bool:
    """A head that sees everything, beside layers with windows."""
    return _SLIDING in _layer_types(fields) and _head_type(fields) != _SLIDING


def _slides(head: Callable[[Fields], str]) -> Callable[[Fields, int], bool]:
    def slides(fields: Fields, layer: int) -> bool:
        kinds = _layer_types(fields)
        is_head = layer >= int(fields.get("num_hidden_layers") or 0)
        if not is_head and layer >= len(kinds):
            raise BadConfig(
                f"layer_types has {len(kinds)} entries, fewer than there are layers. Take the "
                "config.json of the model's release."
            )
        return (head(fields) if is_head else kinds[layer]) == _SLIDING

    return slides


def _kind(fields: Fields, layer: int) -> str:
    return dense_then_sparse(fields, layer, 1)


def _normalised(fields: Fields) -> Fields:
    """Layers with a window rotate, and heads; beside them layers that see everything do not."""
    if any(fields.get("swiglu_limits") or ()):
        raise UnsupportedFamily(
            "swiglu_limits are given, as in K-EXAONE-2.0; the engine computes EXAONE without."
        )
    kinds, window = _layer_types(fields), fields.get("sliding_window")
    found: dict[str, Any] = {"attention_rotates": _SLIDING not in kinds, "head_rotates": True}
    sizes = [fields.get("sliding_windows"), fields.get("mtp_sliding_windows")]
    given = {size for listed in sizes if isinstance(listed, list) for size in listed if size}
    if len(given | ({window} if window else set())) > 1:
        raise UnsupportedFamily(
            f"windows of {', '.join(map(str, sorted(given)))} tokens are given beside "
            f"sliding_window {window!r}; the engine computes EXAONE with one for all layers."
        )
    found["swa_window"] = window or next(iter(given), None)
    heads = fields.get("num_attention_heads")
    dim = fields.get("head_dim") or int(fields.get("hidden_size") or 0) // int(heads or 1)
    found |= {
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": fields.get("num_key_value_heads") or heads,
        "swa_head_dim": dim,
        "swa_v_head_dim": dim,
        "swa_rope_parameters": {
            "rope_theta": fields.get("rope_theta"),
            **(fields.get("rope_scaling") or {}),
            **(fields.get("rope_parameters") or {}),
        },
    }
    return found


_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0}

MOE = Family(
    name="exaone_moe",
    title="K-EXAONE-236B-A23B",
    model_types=("exaone_moe",),
    architectures=("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
    keys=qwen_style(),
    layout=HeadLayout(),
    head=ROLES,
    # A MoE head is conceivable; both engines build the dense one, so only that can be in use.
    block=lambda fields: _DENSE,
    block_kind="dense",
    trunk=Trunk(kinds={"dense": _DENSE, "sparse": _MOE}, kind_of=_kind, slides=_slides(_head_type)),
    looked_up_as={"vllm": "mtp.layers.{module}."},
    served={"vllm": "0.14.0", "sglang": "0.5.9", "trtllm": "1.3.0rc2"},
    is_complete=True,
    runtime=Runtime(
        defaults={**_DEFAULTS, "num_shared_experts": 1, "routed_scaling_factor": 2.5},
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "use_qk_norm": True},
        normalise=_normalised,
        refused={"attention_bias": "the engine computes EXAONE without, as its releases are."},
        parameters=parameters("mlp.router.correction   mlp.e_score_correction_bias"),
    ),
    lacks="windows of several sizes, and limits of inner products (K-EXAONE-2.0)",
    cautions=(
        Caution(
            engine="vllm",
            before="0.32.0",
            concerns=_rotates_in_new_releases_only,
            text="the head, which sees everything, is not rotated as it was trained; expect fewer "
            "accepted drafts, or use 0.32.0 or later",
        ),
    ),
    notes=(
        "attention type and window come from mtp_layer_types and mtp_sliding_windows",
        "layers that see everything do not rotate; the head does, as it was trained by what vLLM "
        "0.32.0 says. SGLang does not rotate it: expect fewer accepted drafts",
    ),
)

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")

EXAONE4_5 = Family(
    name="exaone4_5",
    title="EXAONE-4.5-33B",
    model_types=("exaone4_5", "exaone4_5_text"),
    architectures=("Exaone4_5_ForConditionalGeneration",),
    marked_types=("exaone4",),  # EXAONE-4.0, and the text part of 4.5 as transformers writes it
    marks=("num_nextn_predict_layers",),
    keys=qwen_style(),
    layout=HeadLayout(),
    head=ROLES,
    block=lambda fields: _POST_NORM_BLOCK,
    block_kind="dense",
    trunk=Trunk(
        prefixes=_PREFIXES,
        lm_heads=("lm_head.weight", "language_model.lm_head.weight"),
        kinds={"dense": _POST_NORM_BLOCK},
        # vLLM builds the head's block as the first layer of the trunk
        slides=_slides(lambda fields: _layer_types(fields)[0]),
        beside=("model.visual.", "visual."),
    ),
    looked_up_as={"vllm": "mtp.layers.{module}."},
    served={"vllm": "0.20.0"},
    is_complete=True,
    runtime=Runtime(
        defaults={**_DEFAULTS, "sliding_window": 4096},
        fixed={"use_qk_norm": True},
        normalise=_normalised,
        refused={"attention_bias": "the engine computes EXAONE without, as its releases are."},
        parameters=parameters("""
            attention_out_norm.weight   post_attention_layernorm.weight
            mlp_out_norm.weight         post_feedforward_layernorm.weight
        """),
        has_gpu_kernels=False,
    ),
    notes=(
        "the block normalises after attention and after the MLP, and has no input_layernorm",
        "the head's block has a window, as the first layer of the trunk, by vLLM's construction",
        "served by vLLM only",
    ),
)
