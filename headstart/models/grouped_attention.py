"""Grouped-query attention: several heads share the keys and values of one."""

from __future__ import annotations

import torch
from torch import nn

from headstart.models.attention import Context
from headstart.models.attention_config import AttentionShape
from headstart.models.config import ModelConfig
from headstart.models.linear import Linear
from headstart.models.norm import Norm
from headstart.models.rope import Rotation, rotate


def norm(size: int, config: ModelConfig) -> Norm:
    return Norm(size, config.eps, centred=config.centred_norms)


class Attention(nn.Module):
    """Grouped-query attention with q, k and v in one product, and q's gates beside each q."""

    def __init__(self, config: ModelConfig, shape: AttentionShape):
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.dim
        self.v_dim, self.v_scale = shape.v_dim, config.v_scale
        self.is_gated = config.gated_attention
        self.sizes = [
            ((1 + self.is_gated) * self.heads + self.kv_heads) * self.dim,
            self.kv_heads * self.v_dim,
        ]
        self.qkv = Linear(config.hidden, sum(self.sizes), bias=config.qkv_bias)
        self.o = Linear(self.heads * self.v_dim, config.hidden, bias=config.o_bias)
        self.head_gate = Linear(config.hidden, self.heads) if config.head_gate else None
        self.q_norm = norm(self.dim, config) if config.qk_norm else None
        self.k_norm = norm(self.dim, config) if config.qk_norm else None
        self.sinks = (
            nn.Parameter(torch.empty(self.heads), requires_grad=False) if shape.has_sinks else None
        )

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: Context,
        window: int | None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; [N, hidden] where the context attends for `rows` alone."""
        q, k, v, gate = self.project(x, rotation)
        seen = context.attend(q, k, v, window, self.sinks)
        if rows is not None:
            x, gate = x[rows], None if gate is None else gate[rows]
        return self.finish(x, seen, gate)

    def project(
        self, x: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q [T, heads, dim], k and v [T, kv_heads, dim], and gates where q has them beside it."""
        both, v = torch.split(self.qkv(x), self.sizes, dim=-1)
        rows = both.view(x.shape[0], -1, self.dim)
        v = v.view(x.shape[0], -1, self.v_dim)
        gate = None
        if self.is_gated:  # of each head first its q, then its gate
            queries = rows[:, : 2 * self.heads]
            gate = queries[:, 1::2].flatten(1)
            rows = torch.cat([queries[:, ::2], rows[:, 2 * self.heads :]], dim=1)
        if self.q_norm is None or self.k_norm is None:
            q, k = torch.split(rotate(rows, *rotation), [self.heads, self.kv_heads], dim=1)
        else:
            q, k = torch.split(rows, [self.heads, self.kv_heads], dim=1)
            q, k = rotate(self.q_norm(q), *rotation), rotate(self.k_norm(k), *rotation)
        if self.v_scale != 1:
            v = v * self.v_scale
        return q, k, v, gate

    def finish(
        self, x: torch.Tensor, seen: torch.Tensor, gate: torch.Tensor | None
    ) -> torch.Tensor:
        """What heads have seen [T, heads * dim] -> [T, hidden]."""
        if self.head_gate is not None:
            gate = self.head_gate(x).repeat_interleave(self.v_dim, dim=1)
        result = self.o(seen if gate is None else seen * gate.sigmoid())
        assert isinstance(result, torch.Tensor)
        return result
