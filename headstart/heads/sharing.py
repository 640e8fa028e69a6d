"""What a head takes from its trunk, and whether copies it stores really are copies."""

from __future__ import annotations

from typing import Literal

from headstart.checkpoint.compare import same_bytes
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.reader import Checkpoint
from headstart.families.base import Family
from headstart.heads.detection import FoundHead

Sharing = Literal["from the trunk", "identical copy", "own"]


def trunk_tensor(checkpoint: Checkpoint, owner: Family, role: str) -> TensorInfo | None:
    """The trunk's own `embed_tokens`, `lm_head` or `final_norm`; tied models have one for both."""
    trunk = owner.trunk
    suffix = trunk.final_norm if role == "final_norm" else trunk.embed
    below = [prefix + suffix for prefix in trunk.prefixes]
    candidates = [*trunk.lm_heads, *below] if role == "lm_head" else below
    for name in candidates:
        if name in checkpoint.tensors:
            return checkpoint.tensors[name]
    return None


def trunk_prefix(checkpoint: Checkpoint, owner: Family) -> str:
    """The prefix under which this checkpoint keeps its trunk."""
    for prefix in owner.trunk.prefixes:
        if prefix + owner.trunk.embed in checkpoint.tensors:
            return prefix
    return owner.trunk.prefixes[0]


def sharing(checkpoint: Checkpoint, head: FoundHead) -> dict[str, Sharing]:
    """For embedding and LM head: taken from the trunk, a stored copy, or really its own."""
    result: dict[str, Sharing] = {}
    for role in ("embed_tokens", "lm_head"):
        stored = [
            checkpoint.info(name)
            for ours, name in head.tensors.items()
            if f".{role}.weight" in ours
        ]
        original = trunk_tensor(checkpoint, head.family, role)
        if not stored:
            result[role] = "from the trunk"
        elif original is not None and all(same_bytes(info, original) for info in stored):
            result[role] = "identical copy"
        else:
            result[role] = "own"
    return result
