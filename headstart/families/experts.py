"""Two ways to store the same weights: apart, or fused into one tensor.

A fused tensor stands for several separate ones; which ones, and in which order their rows
follow, is written here once. Names only: `heads/experts.py` moves the bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_EXPERT = re.compile(
    r"(?P<stem>.*\bexperts)\.(?P<expert>0|[1-9][0-9]{0,8})\.(?P<projection>gate|up|down)_proj\.weight"
)


@dataclass(frozen=True)
class FusedSlot:
    """Where one expert's projection lies in a fused tensor."""

    name: str  # the fused tensor
    expert: int
    projection: str  # gate, up or down; gate rows come before up rows


def fused_slot(name: str) -> FusedSlot | None:
    """The place of a per-expert tensor in the fused layout, or None for any other tensor."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    kind = "down_proj" if found["projection"] == "down" else "gate_up_proj"
    return FusedSlot(f"{found['stem']}.{kind}", int(found["expert"]), found["projection"])


def is_fused_experts(name: str) -> bool:
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def split_name(fused: str, expert: int, projection: str) -> str:
    """The per-expert name that a slot of a fused tensor stands for."""
    return f"{fused.rsplit('.', 1)[0]}.{expert}.{projection}_proj.weight"


# Projections that some checkpoints store as one tensor: fused module -> the modules it replaces.
FUSED_MODULES = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def stand_ins(name: str) -> list[str]:
    """Other tensors whose presence means that `name` is there in a fused form."""
    result = []
    slot = fused_slot(name)
    if slot is not None:
        result.append(slot.name)
    module, _, parameter = name.rpartition(".")
    for fused, apart in FUSED_MODULES.items():
        for part in apart:
            if module.endswith("." + part) or module == part:
                result.append(f"{module.removesuffix(part)}{fused}.{parameter}")
    return result
