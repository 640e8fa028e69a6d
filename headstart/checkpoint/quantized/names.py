"""Quantised tensors: recognised by what is stored, carried whole, or turned back into BF16.

Whether a weight is quantised is decided per tensor, from its dtype and the scales beside it,
never from the method that a config names. Schemes: block FP8 (weight_scale_inv, or scale), per-
row or per-tensor FP8 and INT8 (weight_scale). Four-bit packings are carried as they are and
refused for dequantising.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.source import TensorSource, reshaped, rows
from headstart.checkpoint.values import as_bytes, load, one_thread, to_float32
from headstart.errors import ShapeMismatch, UnsupportedFamily

Typed = TensorInfo | TensorSource  # anything with a dtype

_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
# what may stand in place of `weight`
PACKED = ("weight", "weight_packed", "qweight", "weight_q")
# what may stand beside it
SCALES = ("weight_scale_inv", "weight_scale", "scale")
_COMPANIONS = (
    *SCALES, "weight_scale_2", "input_scale", "weight_shape", "weight_zero_point", "qzeros",
    "scales", "g_idx", "input_global_scale", "weight_global_scale", "k_scale", "v_scale",
)  # fmt: skip
_BLOCK = 128
_RANKS = (2, 4, 8, 16)  # numbers of devices that a fused qkv_proj is stored for


def packed_names(name: str) -> list[str]:
    """`name` and the names under which a quantised form of it may be stored instead."""
    module, _, parameter = name.rpartition(".")
    if parameter == "weight":
        return [f"{module}.{packed}" for packed in PACKED]
    return [name, f"{name}_packed"]


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
    return packed or info.dtype in _FP8 or (info.dtype in ("I8", "U8") and name.endswith("weight"))


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
        if info.dtype in ("BF16", "F16", "F32")
        and not is_scale(name)
        and (scale := scale_of(name, infos)) is not None
    ]


def dequantized(name: str, tensors: Mapping[str, TensorSource]) -> TensorSource:
    """The weight in BF16, computed 128 rows at a time; refuses what it cannot read exactly."""
    weight = tensors[name]
    scale_name = scale_of(name, tensors)
    module = name.removesuffix(".weight")
    if (
        scale_name is None
        or weight.dtype not in (*_FP8[:2], "I8")
        or _is_packed_fp4(weight, tensors[scale_name])
        or f"{module}.weight_zero_point" in tensors
    ):
        raise UnsupportedFamily(
            f"{name} is stored as {weight.dtype} in a scheme that cannot be dequantised here; "
            "expected FP8 or INT8 with a scale and no zero point. Formats that keep the "
            "quantisation config (sglang, headstart) carry such tensors as they are."
        )
    scale = tensors[scale_name]
    kind = _scale_kind(name, weight, scale_name, scale)
    columns = weight.shape[-1]
    stack = _stack(name, weight, scale)
    count = prod(weight.shape[:-1]) // stack
    flat = reshaped(weight, (stack * count, columns))
    blocks = -(-count // _BLOCK)  # of rows: no block reaches into the next matrix of the stack

    def pieces() -> Iterator[memoryview]:
        import torch

        with one_thread():
            scales = load(scale).to(torch.float32)
            for matrix, block in product(range(stack), range(blocks)):
                start = matrix * count + block * _BLOCK
                stop = min(start + _BLOCK, (matrix + 1) * count)
                part = to_float32(load(rows(flat, start, stop)))
                if kind == "block":
                    row = scales.reshape(stack * blocks, -1)[matrix * blocks + block]
                    part = part * row.repeat_interleave(_BLOCK)[:columns]
                elif kind == "row":
                    part = part * scales.reshape(-1)[start:stop, None]
                else:
                    part = part * scales.reshape(())
                yield as_bytes(part.to(torch.bfloat16))

    return TensorSource("BF16", weight.shape, pieces, is_copy=False)


def _stack(name: str, weight: TensorSource, scale: TensorSource) -> int:
    """How many matrices lie in one tensor, each with blocks of its own.

    Fused experts are a stack. MiMo-V2.5 stores q, k and v as one matrix for each of several ranks,
    one below the other; where their rows are no multiple of a block, the number of scales tells.
    """
    if len(weight.shape) != 2 or not name.endswith("qkv_proj.weight"):
        return prod(weight.shape[:-2])
    count, stored = weight.shape[0], scale.shape[0] if len(scale.shape) == 2 else 0
    if stored in (count, -(-count // _BLOCK)):
        return 1
    fitting = [n for n in _RANKS if count % n == 0 and n * -(-(count // n) // _BLOCK) == stored]
    return fitting[0] if len(fitting) == 1 else 1


def _is_packed_fp4(weight: TensorSource, scale: TensorSource) -> bool:
    """DeepSeek-V4's experts: two values in a byte, one power of two per 32 values."""
    return weight.dtype == "I8" and scale.dtype in ("F8_E8M0", "U8")


def _scale_kind(name: str, weight: TensorSource, scale_name: str, scale: TensorSource) -> str:
    if len(weight.shape) in (2, 3) and 0 not in weight.shape:
        *experts, count, columns = weight.shape
        if scale.shape in ((), (1,)):
            return "tensor"
        if scale.shape in ((*experts, count), (*experts, count, 1)):
            return "row"
        stack = _stack(name, weight, scale) if not experts else 1
        row_blocks = stack * -(-(count // stack) // _BLOCK)
        if scale.shape == (*experts, row_blocks, -(-columns // _BLOCK)):
            return "block"
    raise ShapeMismatch(
        f"{scale_name} has shape {scale.shape} beside {name} {weight.shape}; expected one value "
        f"per {_BLOCK}x{_BLOCK} block (of each expert), per row, or one in all. Weight and scale "
        "do not belong together; take both from one release."
    )
