"""x W^T with fp8 weights for any number of rows, in x's type.

Up to a few hundred rows the weights are converted on their way, as in `linear.py`. With more rows
arithmetic takes the time, which libraries do best: parts of W are copied to x's type for them.

M rows, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import FP8_TILE_ROWS, fp8_shape_for, launch_linear

MAX_CONVERTED_ROWS = FP8_TILE_ROWS[-1]
_COPIED_VALUES = 1 << 27  # of W at a time: memory for the copy, not for an LM head's
_BLOCK = 2048


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [M, K], weight [N, K] fp8, scales [N] fp32 -> x W^T [M, N] in x's type."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    result = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows <= MAX_CONVERTED_ROWS:
        shape = replace(fp8_shape_for(outputs, inputs, rows), splits=1)
        launch_linear(x, weight, scales, result, shape)
        return result
    each = max(1, _COPIED_VALUES // inputs)
    for start in range(0, outputs, each):
        part = slice(start, start + each)
        copy = dequantized_rows(weight[part], scales[part], x.dtype)
        torch.mm(x, copy.t(), out=result[:, part])
    return result


def dequantized_rows(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [N, K] fp8 times scales [N], in `dtype`."""
    outputs, inputs = weight.shape
    assert weight.is_contiguous()
    result = torch.empty(outputs, inputs, dtype=dtype, device=weight.device)
    _dequantize[(outputs, triton.cdiv(inputs, _BLOCK))](
        weight, scales, result, inputs, BLOCK=_BLOCK, num_warps=4
    )
    return result


@jit
def _dequantize(weight, scales, result, inputs, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    where = row.to(tl.int64) * inputs + at
    values = tl.load(weight + where, at < inputs, 0.0).to(tl.float32) * tl.load(scales + row)
    tl.store(result + where, values.to(result.dtype.element_ty), at < inputs)
