"""Mamba-2 (arXiv 2405.21060): a recurrent layer whose memory fades and is added to.

A head's memory S maps a state of size K to values. With a time step d_t of its own for each head,

    S_t = exp(d_t A) S_{t-1} + B_t (d_t x_t)^T,   o_t = S_t^T C_t + D x_t

B and C are shared by the heads of a group. Unlike the delta rule, nothing is read from the memory
before it is written to: inside a chunk rows depend on each other through one matrix alone.

T rows, H heads, K state size, V head size; memory [H, K, V]; everything in fp32 at least. Time
steps are softplus of what is projected, without limits, as vLLM computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus

from headstart.models.linear import Linear
from headstart.models.mamba_config import MambaConfig
from headstart.models.recurrence import Recurrence
from headstart.models.rope import Rotation


@dataclass(frozen=True)
class MambaRows:
    """What the recurrence reads of each row: q and k [T, H, K], v [T, H, V], log_decay [T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor  # never above 0

    def __getitem__(self, rows: slice | Tensor) -> MambaRows:
        return MambaRows(self.q[rows], self.k[rows], self.v[rows], self.log_decay[rows])

    @property
    def num_rows(self) -> int:
        return self.v.shape[0]

    def step(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One row each of B texts: memory [B, H, K, V] -> results [B, H, V], the memory after."""
        memory = memory * self.log_decay.exp()[..., None, None]
        memory = memory + self.k[..., :, None] * self.v[..., None, :]
        return (self.q[..., None, :] @ memory).squeeze(-2), memory

    def over_chunk(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """All rows of one text: memory [H, K, V] -> results [T, H, V] and the memory after them."""
        q, k, v = (part.transpose(0, 1) for part in (self.q, self.k, self.v))  # [H, T, ...]
        faded = self.log_decay.t().cumsum(-1)  # log of what is left of the old memory at each row
        from_start = faded.exp()[..., None]
        ahead = torch.ones(self.num_rows, self.num_rows, dtype=torch.bool, device=q.device).triu(1)
        # Masked before the exponential: ahead of a row it would overflow.
        between = (faded[:, :, None] - faded[:, None, :]).masked_fill(ahead, -torch.inf).exp()
        results = from_start * (q @ memory) + ((q @ k.transpose(1, 2)) * between) @ v
        to_end = (faded[:, -1:] - faded).exp()[..., None]
        memory = memory * from_start[:, -1:] + (k * to_end).transpose(1, 2) @ v
        return results.transpose(0, 1), memory


class Mamba(nn.Module):
    """All input projections in one product: output gate, convolved channels, time steps."""

    def __init__(self, hidden: int, config: MambaConfig, eps: float):
        super().__init__()
        self.config, self.eps = config, eps
        self.sizes = [config.values, config.channels, config.v_heads]
        self.inputs = Linear(hidden, sum(self.sizes))
        self.conv = _fixed(config.channels, 1, config.kernel)
        self.conv_bias = _fixed(config.channels) if config.has_conv_bias else None
        self.a_log = _fixed(config.v_heads)
        self.dt_bias = _fixed(config.v_heads)
        self.skip = _fixed(config.v_heads)  # D
        self.norm = _fixed(config.values)
        self.out = Linear(config.values, hidden)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Stay in fp32 when the model does not: decays are exponentials of them."""
        nn.Module._apply(self, fn, recurse)
        for parameter in (self.a_log, self.dt_bias, self.skip):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        return self

    def forward(
        self, x: Tensor, rotation: Rotation | None, context: Recurrence, window: None = None
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]; positions do not matter to it, only the order of rows."""
        gate, mixed, steps = torch.split(self.inputs(x), self.sizes, dim=-1)
        mixed = context.convolve(mixed, self.conv.squeeze(1))
        mixed = silu(mixed if self.conv_bias is None else mixed + self.conv_bias)
        config, count = self.config, len(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        states = config.k_heads * config.k_dim
        v, k, q = torch.split(mixed.to(wide), [config.values, states, states], dim=-1)
        v = v.reshape(count, config.v_heads, config.v_dim)
        steps = softplus(steps.to(wide) + self.dt_bias.to(wide))
        rows = MambaRows(
            self._of_heads(q), self._of_heads(k), v * steps[..., None],
            -self.a_log.to(wide).exp() * steps,
        )  # fmt: skip
        seen = context.recur(rows) + v * self.skip.to(wide)[:, None]
        # gated first, then normed group by group
        gated = (seen.flatten(1) * silu(gate.to(wide))).view(count, config.k_heads, config.group)
        normed = rms_norm(gated, (config.group,), eps=self.eps).flatten(1).to(x.dtype)
        result = self.out(normed * self.norm)
        assert isinstance(result, Tensor)
        return result

    def _of_heads(self, part: Tensor) -> Tensor:
        """[T, groups * K] -> [T, H, K]: heads of a group have the same."""
        config = self.config
        each = part.reshape(len(part), config.k_heads, config.k_dim)
        return each.repeat_interleave(config.v_heads // config.k_heads, 1)


def _fixed(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
