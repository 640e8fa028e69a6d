"""Which families the embedded engine runs, and training and scoring with it; what others need.

Held against the models themselves by tests/unit/families/test_running.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Running:
    """How a family is run here."""

    model_types: tuple[str, ...]
    is_fused: bool = False  # whether the GPU kernels take it; else it is plain PyTorch there
    lacks: str = ""  # what its other model types need


_RUNNING = {
    "deepseek_v3": Running(("deepseek_v3",), is_fused=True),
    "deepseek_v32": Running(("deepseek_v32", "deepseek_v3")),
    "ernie4_5_moe": Running(("ernie4_5_moe",), is_fused=True),
    "glm4_moe": Running(("glm4_moe",), is_fused=True),
    "glm4_moe_lite": Running(("glm4_moe_lite",), is_fused=True),
    "glm_moe_dsa": Running(("glm_moe_dsa",)),
    "mimo": Running(("mimo",), is_fused=True),
    "mimo_v2": Running(
        ("mimo_v2_flash",), lacks="the fused qkv_proj of V2-Pro and V2.5, stored for eight ranks"
    ),
    "qwen3": Running(("qwen3",), is_fused=True),
    "qwen3_5": Running(("qwen3_5", "qwen3_5_text"), is_fused=True),
    "qwen3_5_moe": Running(("qwen3_5_moe", "qwen3_5_moe_text"), is_fused=True),
    "qwen3_next": Running(("qwen3_next",), is_fused=True),
    "step3p5": Running(("step3p5", "step3p7")),
}
_LACKING = {
    "deepseek_v4": "several residual streams with hyper-connections, K/V compressed by layer, "
    "output projections in groups, and a head that is fed those streams",
    "nemotron_h": "Mamba layers, and experts without gates in a latent space",
    "glm_ocr": "norms behind attention and MLP, and positions of images",
    "longcat_flash": "layers of two attentions with experts beside them",
    "gemma4_assistant": "attention over the K/V of another model",
    "inkling": "short convolutions in attention",
    "minimax_m3": "sparse attention by blocks",
    "kimi_k3": "its linear attention, and latent attention without positions",
}
_NOT_WRITTEN = "its decoder layers, which nobody has written for it yet"


def running(family_name: str) -> Running | None:
    """How the engine runs a family; None if it does not."""
    return _RUNNING.get(family_name)


def lacking(family_name: str) -> str:
    """What the engine lacks for a family, or for the rest of its model types; empty if nothing."""
    found = running(family_name)
    return found.lacks if found is not None else _LACKING.get(family_name, _NOT_WRITTEN)
