"""Formats that are read and that `calibrate --weights` does not write, for tiny checkpoints.

Two of them are those of `benchmarks/read_formats.py`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import torch
from torch.nn.functional import pad

from headstart.checkpoint.quantized.nearest import fp8_tensor
from headstart.checkpoint.quantized.packing import pack
from headstart.checkpoint.quantized.writing import (
    FORMATS,
    WrittenFormat,
    compressed_config,
    compressed_group,
)

# Programs of `benchmarks` are found as they find each other: in the folder they lie in.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
_READ: dict[str, WrittenFormat] = import_module("read_formats").READ

_BLOCK = (32, 64)  # rows and columns of FP8 that share a scale
_LARGEST = 448  # of e4m3


def _packed_asymmetric(values: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Four bits with zero points, which are packed along the outputs."""
    parts = values.view(len(values), -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-4).to(torch.bfloat16)
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (parts / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return {
        "weight_packed": pack(codes.clamp(0, 15).byte().view_as(values), 4),
        "weight_scale": scales, "weight_shape": torch.tensor(values.shape, dtype=torch.int64),
        "weight_zero_point": pack(zeros.byte().t().contiguous(), 4).t().contiguous(),
    }  # fmt: skip


def _fp8_small_blocks(values: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    (rows, columns), (high, wide) = values.shape, _BLOCK
    padded = pad(values, (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, -1, wide)
    scales = blocks.abs().amax(dim=(1, 3)) / _LARGEST
    steps = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return {"weight": steps.to(torch.float8_e4m3fn), "weight_scale_inv": scales}


_FOUR = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group"}
_WHOLE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
_STATIC = {"targets": ["Linear"], **compressed_group(_WHOLE, _WHOLE, "float-quantized")}
ALSO_READ: dict[str, WrittenFormat] = {
    **_READ,
    "packed-asymmetric": WrittenFormat(
        lambda n, k, g: {
            "weight_packed": ("I32", (n, k // 8)), "weight_scale": ("BF16", (n, k // g)),
            "weight_shape": ("I64", (2,)), "weight_zero_point": ("I32", (n // 8, k // g)),
        },
        _packed_asymmetric,
        lambda g: compressed_config(
            {"group_0": {"targets": ["Linear"], "weights": {**_FOUR, "group_size": g}}},
            "pack-quantized",
        ),
        outputs=8,
    ),
    # One scale per matrix, and one for its inputs that was found before.
    "fp8-static": WrittenFormat(
        lambda n, k, g: {**FORMATS["fp8-tensor"].layout(n, k, g), "input_scale": ("F32", (1,))},
        lambda values, g: {**fp8_tensor(values, g), "input_scale": torch.tensor([0.02])},
        lambda g: compressed_config({"group_0": _STATIC}, "float-quantized"),
        groups=(), quantizes_head=True,
    ),
    "fp8-small-blocks": WrittenFormat(
        lambda n, k, g: {
            "weight": ("F8_E4M3", (n, k)),
            "weight_scale_inv": ("F32", (-(-n // _BLOCK[0]), -(-k // _BLOCK[1]))),
        },
        _fp8_small_blocks,
        lambda g: {"quant_method": "fp8", "weight_block_size": list(_BLOCK)},
        groups=(), quantizes_head=True,
    ),
}  # fmt: skip
