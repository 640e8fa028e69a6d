"""The norm of every layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import rms_norm


class Norm(nn.Module):
    """RMSNorm over the last axis; a centred one stores how far its weight is from 1."""

    def __init__(self, size: int, eps: float, *, centred: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps, self.centred = eps, centred
        self._factor: torch.Tensor | None = None

    @property
    def factor(self) -> torch.Tensor:
        """What normed rows are multiplied with, for kernels; weights must not change any more."""
        if not self.centred:
            return self.weight
        if self._factor is None or self._factor.device != self.weight.device:
            self._factor = 1 + self.weight.float()
        return self._factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.centred:
            return rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # 1 + w in half precision would lose most of what w says.
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = rms_norm(x.to(wide), (x.shape[-1],), 1 + self.weight.to(wide), self.eps)
        return normed.to(x.dtype)
