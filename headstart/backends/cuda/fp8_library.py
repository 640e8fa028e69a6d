"""x W^T of 8-bit floats by torch's library, where arithmetic takes the time.

Scales of rows are taken by every version that has 8-bit floats; scales of 128 x 128 by versions
from 2.10 on, with lines of a length that the older operator refuses for some matrices, which is
tried once on each device before it is relied on.

M rows, N outputs, K inputs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from headstart.backends.cuda.kernels.eight_bits import GROUP, Fp8Rows, fp8_rows

_WIDTH = 16  # inputs and outputs: what the library counts in
_SCALES = 4  # of blocks, along the inputs: the library reads them in fours
_TOLERANCE = 0.01


def takes(rows: Fp8Rows, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
    """Whether the library has this product."""
    if not weight.is_cuda or dtype != torch.bfloat16:
        return False
    if scales.dim() == 1:
        return all(size % _WIDTH == 0 for size in weight.shape)
    is_whole = all(size % GROUP == 0 for size in weight.shape)
    return is_whole and rows.shape[0] % _SCALES == 0 and takes_blocks(weight.device)


def library_fp8(rows: Fp8Rows, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] in `dtype`; `scales` [N], or of blocks as `library_scales` lays them out."""
    if rows.group:
        return functional.scaled_mm(
            rows.values, weight.t(), rows.scales.t(), functional.ScalingType.BlockWise1x128,
            scales.t(), functional.ScalingType.BlockWise128x128, output_dtype=dtype,
        )  # fmt: skip
    return torch._scaled_mm(
        rows.values, weight.t(), scale_a=rows.scales.view(-1, 1), scale_b=scales.view(1, -1),
        out_dtype=dtype,
    )  # fmt: skip


def library_scales(scales: Tensor) -> Tensor:
    """The same scales; those of blocks in lines of a length that the library reads."""
    if scales.dim() == 1:
        return scales
    lines, count = scales.shape
    room = scales.new_ones(lines, -(-count // _SCALES) * _SCALES)
    room[:, :count] = scales
    return room


@cache
def takes_blocks(device: torch.device) -> bool:
    """Whether scales of blocks give the right product here, five of them along the inputs."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    draw = torch.Generator(device).manual_seed(0)
    shape = 2 * GROUP, 5 * GROUP
    values = torch.randn(shape, device=device, generator=draw).mul_(60).to(torch.float8_e4m3fn)
    scales = 0.5 + torch.rand(2, 5, device=device, generator=draw)
    rows = fp8_rows(torch.randn(_WIDTH, shape[1], device=device, generator=draw))
    try:
        found = library_fp8(rows, values, library_scales(scales), torch.bfloat16).float()
    except (AttributeError, RuntimeError, ValueError):  # a version, or a GPU, without them
        return False
    wide = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    x = rows.values.float() * rows.scales.t().repeat_interleave(GROUP, 1)
    wanted = x @ (values.float() * wide).t()
    return bool((found - wanted).norm() < _TOLERANCE * wanted.norm())
