"""Quantised tensors are recognised by what is stored.

Whether a weight is quantised is decided per tensor, from its dtype and the scales beside it,
never from the method that a config names. `reading.py` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from headstart.checkpoint.dtypes import BLOCK_TYPES
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.source import TensorSource

Typed = TensorInfo | TensorSource  # anything with a dtype

_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
PLAIN = ("BF16", "F16", "F32", "F64")  # weights that are not quantised
# what may stand in place of `weight`
PACKED = ("weight", "weight_packed", "qweight", "weight_q")
# what may stand beside it
SCALES = ("weight_scale_inv", "weight_scale", "scale")
_COMPANIONS = (
    *SCALES, "weight_scale_2", "input_scale", "weight_shape", "weight_zero_point", "weight_zp",
    "qzeros", "scales", "g_idx", "weight_g_idx", "input_global_scale", "weight_global_scale",
    "k_scale", "v_scale", "biases",
)  # fmt: skip


def packed_names(name: str) -> list[str]:
    """`name` and the names under which a quantised form of it may be stored instead."""
    module, _, parameter = name.rpartition(".")
    if parameter == "weight":
        return [f"{module}.{packed}" for packed in PACKED]
    return [name, f"{name}_packed"]


def all_names(name: str) -> list[str]:
    """Every name under which a part of the weight `name` may be stored."""
    module = name.rpartition(".")[0]
    return [*packed_names(name), *(f"{module}.{companion}" for companion in _COMPANIONS)]


def is_scale(name: str) -> bool:
    """Whether a tensor only helps to read another one."""
    if ".hc_" in name:  # DeepSeek-V4's hyper-connections have scales that are weights
        return False
    parameter = name.rpartition(".")[2]
    return parameter in _COMPANIONS or parameter.endswith(("_scale_inv", "_scale"))


def scale_of(name: str, tensors: Mapping[str, object]) -> str | None:
    """The scale stored beside the weight `name`, or None."""
    module, _, parameter = name.rpartition(".")
    if parameter == "weight":
        options = [f"{module}.{scale}" for scale in SCALES]
    else:  # fused experts carry no `.weight`
        options = [f"{name}_scale_inv", f"{name}_scale"]
    return next((option for option in options if option in tensors), None)


def is_quantized(name: str, info: Typed) -> bool:
    """Whether the weight is stored in a form that needs a companion to be read."""
    if is_scale(name):
        return False
    packed = name.rpartition(".")[2] in PACKED[1:] or info.dtype in ("F4", "F6_E2M3", "F6_E3M2")
    if packed or info.dtype in _FP8 or info.dtype in BLOCK_TYPES:
        return True
    return info.dtype in ("I8", "U8", "U32") and name.endswith("weight")


def missing_scales(infos: Mapping[str, Typed]) -> list[str]:
    """Scales that FP8 weights need and that are not stored."""
    lost = []
    for name, info in infos.items():
        if info.dtype in _FP8 and name.endswith("weight") and scale_of(name, infos) is None:
            lost.append(f"{name.removesuffix('weight')}{_usual_scale(infos)}")
    return lost


def _usual_scale(infos: Mapping[str, Typed]) -> str:
    found = [name.rpartition(".")[2] for name in infos if name.rpartition(".")[2] in SCALES]
    return max(set(found), key=found.count) if found else SCALES[0]


def stale_scales(infos: Mapping[str, Typed]) -> list[str]:
    """Scales beside weights that are not quantised: the weight was replaced alone."""
    return [
        scale
        for name, info in infos.items()
        if info.dtype in PLAIN
        and not is_scale(name)
        and (scale := scale_of(name, infos)) is not None
    ]
