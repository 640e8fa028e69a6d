"""The trunk's tensors of a checkpoint, dequantised where they are stored in 8 bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.errors import UnsupportedFamily, some
from headstart.families.base import Family
from headstart.heads.quantization import dequantized, is_quantized, is_scale, scale_of

# Scales of what this engine keeps in full precision: activations, keys and values.
_UNUSED_SCALES = {
    "activations": ("input_scale", "input_global_scale"),
    "keys and values": ("k_scale", "v_scale", "q_scale", "kv_scale"),
}


def trunk_tensors(
    checkpoint: Checkpoint, family: Family | None, head: Collection[str], notes: list[str]
) -> dict[str, TensorSource]:
    """Published tensors of the trunk; `head` are the published names of the head's own."""
    vision_prefixes = family.trunk.beside if family is not None else ()
    vision = {name for name in checkpoint.tensors if name.startswith(vision_prefixes)}
    if vision:
        notes.append(f"text only: {len(vision)} tensors of the vision part are not loaded")
    left_out = {*head, *vision}
    stored = {n: checkpoint.source(n) for n in checkpoint.tensors if n not in left_out}
    offsets = [name for name in stored if name.endswith("weight_zero_point")]
    if offsets:
        raise UnsupportedFamily(
            f"the weights have zero points ({some(offsets)}), which are not dequantised here; "
            "expected a symmetric scheme. Take another quantisation of the model."
        )
    quantized = [name for name, source in stored.items() if is_quantized(name, source)]
    for name in quantized:
        _refuse_groups(name, stored)
    result = {
        name: dequantized(name, stored) if name in quantized else source
        for name, source in stored.items()
        if not is_scale(name)
    }
    used = {scale_of(name, stored) for name in quantized}
    left = [name for name in stored if is_scale(name) and name not in used]
    for what, endings in _UNUSED_SCALES.items():
        own = [name for name in left if name.rpartition(".")[2] in endings]
        if own:
            notes.append(f"{what} stay unquantised here; not used: {some(own)}")
        left = [name for name in left if name not in own]
    beside = {scale_of(name, stored) for name in result if name not in quantized}
    stale = [name for name in left if name in beside]
    if stale:
        notes.append(f"not applied, their weights are stored unquantised: {some(stale)}")
    # Anything else is refused by name when the trunk is filled.
    return {**result, **{name: stored[name] for name in left if name not in stale}}


def _refuse_groups(name: str, stored: Mapping[str, TensorSource]) -> None:
    scale = stored.get(scale_of(name, stored) or "")
    if scale is None or len(scale.shape) != 2 or len(stored[name].shape) != 2:
        return
    rows, columns = stored[name].shape
    groups = scale.shape[1]
    if scale.shape[0] == rows > 1 and groups > 1 and columns % groups == 0:
        raise UnsupportedFamily(
            f"{name} is quantised in groups of {columns // groups} columns ({groups} scales per "
            "row), which is not dequantised here; expected one scale per row, per 128x128 block "
            "or per tensor. Take another quantisation of the model."
        )
