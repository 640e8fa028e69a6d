"""Tensors in memory as sources, for what reads quantised weights."""

from __future__ import annotations

import torch

from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes

_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8",
    torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


def source(tensor: torch.Tensor) -> TensorSource:
    data = bytes(as_bytes(tensor.reshape(-1)))
    return TensorSource(_NAMES[tensor.dtype], tuple(tensor.shape), lambda: (data,), is_copy=False)


def fp8(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
