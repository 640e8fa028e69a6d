"""Formats that are read and that `calibrate --weights` does not write, and rows in 8-bit floats.

For `formats_quality.py`, to nearest as the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad

from headstart.checkpoint.quantized.packing import POWER_BIAS, pack
from headstart.checkpoint.quantized.weights import FP8_BLOCK
from headstart.checkpoint.quantized.writing import (
    WrittenFormat,
    compressed_config,
    compressed_group,
)
from headstart.models.linear import Linear
from headstart.models.quantized import Fp8Linear

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LARGEST_POWER = 8  # of e4m3: 448 is 1.75 * 2^8
_MIDDLE = 128  # of unsigned bytes
_MX_GROUP = 32


class RoundedRows(Linear):
    """A product whose rows are rounded to e4m3, by row, or by 128 inputs beside blocks of scales.

    As `backends/cuda/kernels/eight_bits.py` rounds them; what is multiplied is dequantised.
    """

    group: int  # 0: a whole row

    @classmethod
    def of(cls, source: Linear) -> nn.Module:
        """Of a product with 8-bit floats; others stay as they are."""
        if not isinstance(source, Fp8Linear):
            return source
        made = cls(0, 0)
        made.weight = nn.Parameter(source.dequantized(torch.float32), requires_grad=False)
        made.bias = source.bias
        made.group = FP8_BLOCK if source.quantized.form == "fp8-block" else 0
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(rounded_rows(x, self.group), self.weight, self.bias)


def rounded_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [M, K] in e4m3 and back, with a scale for each `group` inputs of a row; 0: for a row."""
    width = x.shape[-1]
    parts = pad(x, (0, -width % (group or width))).unflatten(-1, (-1, group or width))
    scales = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _LARGEST
    steps = (parts / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    rounded: torch.Tensor = (steps.to(x.dtype) * scales).flatten(-2)
    return rounded[..., :width]


def _int8_groups(values: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Symmetric, in words of four."""
    parts = values.view(len(values), -1, group)
    scales = (parts.abs().amax(-1) / (_MIDDLE - 0.5)).clamp(min=1e-12).to(torch.bfloat16)
    codes = (parts / scales.float().unsqueeze(-1)).round() + _MIDDLE
    return {
        "weight_packed": pack(codes.clamp(0, 255).to(torch.uint8).view_as(values), 8),
        "weight_scale": scales, "weight_shape": torch.tensor(values.shape, dtype=torch.int64),
    }  # fmt: skip


def _mxfp8(values: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    parts = values.view(len(values), -1, _MX_GROUP)
    # The largest number is in the range of the largest power, or is cut off to it.
    exponents = parts.abs().amax(-1).clamp(min=2.0**-110).log2().floor() - _LARGEST_POWER
    steps = (parts / torch.exp2(exponents).unsqueeze(-1)).clamp(-_LARGEST, _LARGEST)
    return {
        "weight": steps.view_as(values).to(torch.float8_e4m3fn),
        "weight_scale": (exponents + POWER_BIAS).to(torch.uint8),
    }


def _config(kind: str, group: int, form: str, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 8, "type": kind, "symmetric": True, "strategy": "group", "group_size": group,
        **more,
    }  # fmt: skip
    return compressed_config(
        {"group_0": {"targets": ["Linear"], **compressed_group(weights, None, form)}}, form
    )


READ = {
    "int8-group": WrittenFormat(
        lambda n, k, g: {
            "weight_packed": ("I32", (n, k // 4)), "weight_scale": ("BF16", (n, k // g)),
            "weight_shape": ("I64", (2,)),
        },
        _int8_groups,
        lambda g: _config("int", g, "pack-quantized"),
    ),
    "mxfp8": WrittenFormat(
        lambda n, k, g: {
            "weight": ("F8_E4M3", (n, k)), "weight_scale": ("U8", (n, k // _MX_GROUP)),
        },
        _mxfp8,
        lambda g: _config("float", g, "mxfp8-quantized", scale_dtype="torch.uint8"),
        groups=(_MX_GROUP,), quantizes_head=True,
    ),
}  # fmt: skip
