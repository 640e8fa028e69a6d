"""Kimi's delta attention (arXiv 2510.26692): the delta rule with a decay for each channel of a key.

As the gated delta net (`models/linear_attention.py`) it keeps a memory from keys to values and the
last rows of a short convolution; here every channel of a head's keys fades by itself:

    S_t = diag(a_t) S_{t-1} + k_t d_t^T,   d_t = b_t (v_t - (diag(a_t) S_{t-1})^T k_t)

T rows, H heads, K key size, V value size; memory [H, K, V]; everything in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus

from headstart.models.delta_config import DeltaConfig
from headstart.models.linear import Linear
from headstart.models.linear_attention import unit
from headstart.models.recurrence import Recurrence
from headstart.models.rope import Rotation

# Inside a chunk decays between two rows are held for every channel, so that it must be short.
_CHUNK_ROWS = 16


@dataclass(frozen=True)
class ChannelRows:
    """What the rule reads of each row: q, k and log_decay [T, H, K], v [T, H, V], strength [T, H].

    `step` and `over_chunk` are those of `models/delta_rule.Rows`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor  # never above 0
    strength: Tensor

    def __getitem__(self, rows: slice | Tensor) -> ChannelRows:
        parts = (self.q, self.k, self.v, self.log_decay, self.strength)
        return ChannelRows(*(part[rows] for part in parts))

    @property
    def num_rows(self) -> int:
        return self.v.shape[0]

    def step(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        memory = memory * self.log_decay.exp()[..., None]
        known = (self.k[..., None, :] @ memory).squeeze(-2)
        change = (self.v - known) * self.strength[..., None]
        memory = memory + self.k[..., :, None] * change[..., None, :]
        return (self.q[..., None, :] @ memory).squeeze(-2), memory

    def over_chunk(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        results = []
        for start in range(0, self.num_rows, _CHUNK_ROWS):
            part, memory = _scan(self[start : start + _CHUNK_ROWS], memory)
            results.append(part)
        return torch.cat(results), memory


def _scan(rows: ChannelRows, memory: Tensor) -> tuple[Tensor, Tensor]:
    """A few rows at once: their changes depend on each other through a triangular system."""
    q, k, v = (part.transpose(0, 1) for part in (rows.q, rows.k, rows.v))  # [H, T, ...]
    strength = rows.strength.t()[..., None]
    faded = rows.log_decay.transpose(0, 1).cumsum(1)  # log of what is left of the old memory
    count = rows.num_rows
    ahead = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
    # Masked before the exponential: ahead of a row it would overflow.
    between = faded.unsqueeze(2) - faded.unsqueeze(1)  # [H, T, T, K]
    between = between.masked_fill(ahead[..., None], -torch.inf).exp()
    overlap = strength * torch.einsum("htk,hsk,htsk->hts", k, k, between)
    wanted = strength * (v - (k * faded.exp()) @ memory)
    change = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    results = (q * faded.exp()) @ memory
    results = results + torch.einsum("htk,hsk,htsk->hts", q, k, between) @ change
    to_end = (faded[:, -1:] - faded).exp()
    memory = memory * faded[:, -1].exp()[..., None] + (k * to_end).transpose(1, 2) @ change
    return results.transpose(0, 1), memory


class KimiDeltaAttention(nn.Module):
    """All projections of the row in one product: q, k and v, what decays and gates come from, b."""

    def __init__(self, hidden: int, config: DeltaConfig, eps: float):
        super().__init__()
        self.config, self.eps = config, eps
        wide, dim = config.values, config.v_dim
        size = dim if config.is_low_rank else wide
        self.sizes = [config.channels, size, size, config.v_heads]
        self.inputs = Linear(hidden, sum(self.sizes))
        self.q_conv, self.k_conv, self.v_conv = (
            nn.Parameter(torch.empty(wide, 1, config.kernel), requires_grad=False) for _ in "qkv"
        )
        self.decay_up = Linear(dim, wide) if config.is_low_rank else None
        self.gate_up = Linear(dim, wide) if config.is_low_rank else None
        self.a_log = nn.Parameter(torch.empty(config.v_heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(wide), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.out = Linear(wide, hidden)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Both stay in fp32 when the model does not: decays are exponentials of them."""
        nn.Module._apply(self, fn, recurse)
        for parameter in (self.a_log, self.dt_bias):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        return self

    def forward(
        self, x: Tensor, rotation: Rotation | None, context: Recurrence, window: None = None
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]; positions do not matter to it, only the order of rows."""
        mixed, decay, gate, b = torch.split(self.inputs(x), self.sizes, dim=-1)
        conv = torch.cat([self.q_conv, self.k_conv, self.v_conv]).squeeze(1)
        mixed = silu(context.convolve(mixed, conv))
        if self.decay_up is not None and self.gate_up is not None:
            decay, gate = self.decay_up(decay), self.gate_up(gate)
        result = context.recur(self._rows(mixed, decay, b)).to(x.dtype)
        normed = rms_norm(result, (self.config.v_dim,), self.norm, self.eps).flatten(1)
        result = self.out(normed * gate.sigmoid())
        assert isinstance(result, Tensor)
        return result

    def _rows(self, mixed: Tensor, decay: Tensor, b: Tensor) -> ChannelRows:
        config = self.config
        wide = torch.promote_types(mixed.dtype, torch.float32)
        shape = (len(mixed), config.v_heads, config.v_dim)
        q, k, v = (part.reshape(shape) for part in mixed.to(wide).chunk(3, dim=-1))
        rate = self.a_log.to(wide).exp()[:, None]
        shifted = (decay.to(wide) + self.dt_bias.to(wide)).view(shape)
        if config.least_log_decay is None:
            log_decay = -rate * softplus(shifted)
        else:
            log_decay = config.least_log_decay * (rate * shifted).sigmoid()
        return ChannelRows(
            unit(q) * config.k_dim**-0.5, unit(k), v, log_decay, b.to(wide).sigmoid()
        )
