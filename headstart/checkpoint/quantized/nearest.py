"""Matrices rounded to nearest, as the tensors that each published format stores for them.

Each maker takes values in fp32 [N, K] and the size of groups, and gives tensors by suffix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.checkpoint.quantized.packing import (
    E2M1,
    POWER_BIAS,
    awq_pack,
    gptq_stored_zeros,
    pack,
)
from headstart.checkpoint.quantized.weights import (
    FP8_BLOCK,
    Fp8Weight,
    GroupWeight,
    QuantizedWeight,
    fp8_rows,
    pack_nibbles,
)

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]
BITS = 4
_LARGEST_CODE, _MIDDLE = 15, 8
_LEAST_SCALE = 2.0**-14  # the smallest that FP16 has with all its bits
_NV_GROUP, _MX_GROUP = 16, 32
_LARGEST_INT8 = 127


def fp8_block(values: torch.Tensor, group: int) -> Tensors:
    import torch
    from torch.nn.functional import pad

    rows, columns = values.shape
    largest = torch.finfo(torch.float8_e4m3fn).max
    padded = pad(values, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scales = (blocks.abs().amax(dim=(1, 3)) / largest).clamp(min=1e-12)
    scaled = (blocks / scales[:, None, :, None]).clamp(-largest, largest).view_as(padded)
    weight = scaled[:rows, :columns].to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale_inv": scales}


def fp8_row(values: torch.Tensor, group: int) -> Tensors:
    return as_compressed(fp8_rows(values))


def fp8_tensor(values: torch.Tensor, group: int) -> Tensors:
    import torch

    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = (values.abs().amax() / largest).clamp(min=1e-12)
    weight = (values / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": scale.reshape(1)}


def int8_row(values: torch.Tensor, group: int) -> Tensors:
    import torch

    scales = (values.abs().amax(1, keepdim=True) / _LARGEST_INT8).clamp(min=1e-12)
    codes = (values / scales).round().clamp(-_LARGEST_INT8, _LARGEST_INT8) + 128
    return as_compressed(GroupWeight(8, codes.to(torch.uint8), scales))


def awq(values: torch.Tensor, group: int) -> Tensors:
    import torch

    parts = values.view(len(values), -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / _LARGEST_CODE).clamp(min=_LEAST_SCALE).half()
    zeros = (-low / scales.float()).round().clamp(0, _LARGEST_CODE)
    codes = (parts / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    codes = codes.clamp(0, _LARGEST_CODE).to(torch.uint8).view_as(values)
    return {
        "qweight": awq_pack(codes.t().contiguous()),
        "qzeros": awq_pack(zeros.to(torch.uint8).t().contiguous()),
        "scales": scales.t().contiguous(),
    }


def _symmetric(
    values: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unsigned codes [N, K] around 8, and scales [N, K/g]."""
    import torch

    parts = values.view(len(values), -1, group)
    scales = (parts.abs().amax(-1) / (_MIDDLE - 0.5)).clamp(min=_LEAST_SCALE).to(dtype)
    codes = (parts / scales.float().unsqueeze(-1)).round() + _MIDDLE
    return codes.clamp(0, _LARGEST_CODE).to(torch.uint8).view_as(values), scales


def gptq(values: torch.Tensor, group: int) -> Tensors:
    import torch

    codes, scales = _symmetric(values, group, torch.float16)
    zeros = torch.full((scales.shape[1], len(values)), _MIDDLE, dtype=torch.uint8)
    return {
        "qweight": pack(codes, BITS).t().contiguous(),
        "qzeros": gptq_stored_zeros(pack(zeros, BITS), BITS),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(values.shape[1]) // group).to(torch.int32),
    }


def auto_round(values: torch.Tensor, group: int) -> Tensors:
    made = gptq(values, group)  # the same layout, whose columns are always in order
    del made["g_idx"]
    return made


def packed(values: torch.Tensor, group: int) -> Tensors:
    import torch

    codes, scales = _symmetric(values, group, torch.bfloat16)
    return as_compressed(GroupWeight(BITS, pack_nibbles(codes), scales))


def nvfp4(values: torch.Tensor, group: int) -> Tensors:
    import torch

    largest = torch.finfo(torch.float8_e4m3fn).max
    whole = largest * E2M1[-1] / values.abs().amax().clamp(min=1e-6)
    parts = values.view(len(values), -1, _NV_GROUP)
    # The smallest scale that has all its bits keeps groups of zeros from a scale of zero.
    scales = (parts.abs().amax(-1) / E2M1[-1] * whole).clamp(2.0**-6, largest)
    small = scales.to(torch.float8_e4m3fn)
    steps = small.float() / whole
    return {
        "weight_packed": _floats4((parts / steps.unsqueeze(-1)).view_as(values)),
        "weight_scale": small, "weight_global_scale": whole.reshape(1),
    }  # fmt: skip


def mxfp4(values: torch.Tensor, group: int) -> Tensors:
    import torch

    parts = values.view(len(values), -1, _MX_GROUP)
    # A power of two under which the largest number is at most 6, or is cut off to it from below 8.
    exponents = parts.abs().amax(-1).clamp(min=2.0**-120).log2().floor() - 2
    scaled = parts / torch.exp2(exponents).unsqueeze(-1)
    return {
        "weight_packed": _floats4(scaled.view_as(values)),
        "weight_scale": (exponents + POWER_BIAS).to(torch.uint8),
    }


def _floats4(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest 4-bit floats, two in a byte: the even element in the low half."""
    import torch

    grid = torch.tensor(E2M1)
    middles = (grid[1:] + grid[:-1]) / 2
    codes = torch.bucketize(scaled.abs(), middles) + 8 * (scaled < 0)
    return pack_nibbles(codes.to(torch.uint8))


def as_compressed(weight: QuantizedWeight) -> Tensors:
    """A quantised matrix as compressed-tensors stores it: FP8 or int8 by row, 4 bits in groups."""
    import torch

    if isinstance(weight, Fp8Weight):
        assert weight.form == "fp8-row"
        return {"weight": weight.weight, "weight_scale": weight.scales.unsqueeze(1)}
    assert weight.zeros is None and weight.inputs is None
    if weight.bits == 8:
        signed = (weight.weight.to(torch.int16) - 128).to(torch.int8)
        return {"weight": signed, "weight_scale": weight.scales}
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    words = pack(weight.codes(), BITS)
    return {"weight_packed": words, "weight_scale": weight.scales, "weight_shape": shape}
