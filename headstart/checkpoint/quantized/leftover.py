"""The weights among stored tensors, plain and quantised, and what becomes of scales without one."""

from __future__ import annotations

from collections.abc import Mapping

from headstart.checkpoint.quantized.names import PLAIN, is_quantized, is_scale, scale_of
from headstart.checkpoint.quantized.stored import StoredWeight
from headstart.checkpoint.source import TensorSource
from headstart.errors import UnsupportedFamily, some

# What is said of scales that belong to no weight, and their names.
_UNUSED_SCALES = {
    "scales of activations are not used (rows that are rounded get scales of their own)":
        ("input_scale", "input_global_scale"),
    "scales of keys and values are not used (--kv-dtype fp8 makes its own)":
        ("k_scale", "v_scale", "q_scale", "kv_scale"),
}  # fmt: skip


def weights_among(
    tensors: Mapping[str, TensorSource], quantized: Mapping[str, StoredWeight], notes: list[str]
) -> tuple[dict[str, TensorSource | StoredWeight], list[str]]:
    """Plain tensors and quantised weights by name, and the scales that nothing was read with.

    Those of activations and those beside plain weights are told in `notes` and not among the last.
    """
    result: dict[str, TensorSource | StoredWeight] = {
        name: source
        for name, source in tensors.items()
        if not is_scale(name) and not is_quantized(name, source)
    }
    beside = {scale_of(name, tensors): name for name in result if name not in quantized}
    for scale, name in beside.items():
        if scale is not None and tensors[name].dtype not in PLAIN:
            raise UnsupportedFamily(
                f"{name} is stored as {tensors[name].dtype} beside {scale}, a scheme that cannot "
                f"be read here; expected {', '.join(PLAIN)}, or one of the quantised formats that "
                "docs/quantised.md lists. Take another quantisation of the model."
            )
    result.update(quantized)
    used = {name for weight in quantized.values() for name in weight.tensors}
    left = [name for name in tensors if is_scale(name) and name not in used]
    for words, endings in _UNUSED_SCALES.items():
        own = [name for name in left if name.rpartition(".")[2] in endings]
        if own:
            notes.append(f"{words}: {some(own)}")
        left = [name for name in left if name not in own]
    stale = [name for name in left if name in beside]
    if stale:
        notes.append(f"not applied, their weights are stored unquantised: {some(stale)}")
    return result, [name for name in left if name not in stale]
