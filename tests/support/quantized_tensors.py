"""Tensors in memory as sources, for what reads quantised weights."""

from __future__ import annotations

import torch

from headstart.checkpoint.reader import dtype_name
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes


def source(tensor: torch.Tensor) -> TensorSource:
    """A copy, which does not keep the tensor alive."""
    data = bytes(as_bytes(tensor))
    shape = tuple(tensor.shape)
    return TensorSource(dtype_name(tensor.dtype), shape, lambda: (data,), is_copy=False)


def fp8(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
