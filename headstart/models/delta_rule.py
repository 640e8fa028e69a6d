"""The gated delta rule (arXiv 2412.06464) and its short convolution, as functions of one text.

A head's memory S maps keys to values. Row t lets it fade, reads what S holds for its key, and
writes the difference to its own value:

    S_t = a_t S_{t-1} + k_t d_t^T,   d_t = b_t (v_t - a_t S_{t-1}^T k_t),   o_t = S_t^T q_t

`recur` does that row by row. `scan` takes many rows at once: inside a chunk the d_t depend on each
other only through a triangular system. Both give the same numbers up to rounding.

T rows, H heads, K key size, V value size; memory [H, K, V]; everything in fp32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

CHUNK_ROWS = 64


@dataclass(frozen=True)
class DeltaRows:
    """What the rule reads of each row: q and k [T, H, K], v [T, H, V], the others [T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor  # never above 0
    strength: Tensor  # b_t: how much of the difference is written

    def __getitem__(self, rows: slice | Tensor) -> DeltaRows:
        parts = (self.q, self.k, self.v, self.log_decay, self.strength)
        return DeltaRows(*(part[rows] for part in parts))

    @property
    def num_rows(self) -> int:
        return self.v.shape[0]

    def step(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        memory = memory * self.log_decay.exp()[..., None, None]
        known = (self.k[..., None, :] @ memory).squeeze(-2)
        change = (self.v - known) * self.strength[..., None]
        memory = memory + self.k[..., :, None] * change[..., None, :]
        return (self.q[..., None, :] @ memory).squeeze(-2), memory

    def over_chunk(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return _scan_chunk(self, memory)


class Rows(Protocol):
    """What a recurrence reads of each row; other rules than the delta rule are in other files."""

    @property
    def k(self) -> Tensor: ...

    @property
    def v(self) -> Tensor: ...

    @property
    def num_rows(self) -> int: ...

    def __getitem__(self, rows: slice | Tensor) -> Self: ...

    def step(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One row each of B texts: memory [B, H, K, V] -> results [B, H, V], the memory after."""
        ...

    def over_chunk(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Some rows of one text: memory [H, K, V] -> results [T, H, V], the memory after them."""
        ...


def recur(rows: Rows, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One row each of B texts: memory [B, H, K, V] -> results [B, H, V] and the memory after."""
    return rows.step(memory)


def scan(rows: Rows, memory: Tensor) -> tuple[Tensor, Tensor]:
    """All rows of one text: memory [H, K, V] -> results [T, H, V] and the memory after them."""
    results = []
    for start in range(0, rows.num_rows, CHUNK_ROWS):
        part, memory = rows[start : start + CHUNK_ROWS].over_chunk(memory)
        results.append(part)
    return torch.cat(results), memory


def _scan_chunk(rows: DeltaRows, memory: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (part.transpose(0, 1) for part in (rows.q, rows.k, rows.v))  # [H, T, ...]
    strength = rows.strength.t()[..., None]
    faded = rows.log_decay.t().cumsum(-1)  # log of what is left of the old memory at each row
    from_start = faded.exp()[..., None]
    count = rows.num_rows
    ahead = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
    # Masked before the exponential: ahead of a row it would overflow.
    between = (faded[:, :, None] - faded[:, None, :]).masked_fill(ahead, -torch.inf).exp()
    overlap = strength * (k @ k.transpose(1, 2)) * between
    wanted = strength * (v - from_start * (k @ memory))
    # Rows before a row have changed what its key reads: (1 + overlap below the diagonal) d = wanted
    change = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    results = from_start * (q @ memory) + ((q @ k.transpose(1, 2)) * between) @ change
    to_end = (faded[:, -1:] - faded).exp()[..., None]
    memory = memory * from_start[:, -1:] + (k * to_end).transpose(1, 2) @ change
    return results.transpose(0, 1), memory


def convolve(rows: Tensor, before: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each channel over its last rows: rows [T, C], before [n, C], weight [C, n + 1].

    Returns the results [T, C], and all rows that were read: its rows [m, m + n) are what comes
    before row m.
    """
    read = torch.cat([before, rows])
    count = rows.shape[0]
    result = read[:count] * weight[:, 0]
    for back in range(1, weight.shape[1]):
        result = torch.addcmul(result, read[back : back + count], weight[:, back])
    return result, read
