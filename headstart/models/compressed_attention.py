"""Compressed attention (DeepSeek-V4): a row sees near tokens, and far ones as entries of windows.

One entry is key and value of a token for all heads. Its last numbers are rotated, and what heads
gather is rotated back, so that only distances count. Layers with windows make one more entry of
each whole window of tokens, weighed channel by channel by a soft-max of gates. Where rows choose
windows, a window's entry also reaches into the window before it, and an indexer with entries of
its own says which ones a row sees.

What is kept of a token is enough to make the entries of windows when rows ask, so that nothing is
kept of windows: blocks, prefix hits and rejected drafts need nothing more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from headstart.models.attention import EntryContext, Seen
from headstart.models.compressed_config import CompressedConfig
from headstart.models.indexer import IndexRows, best_of, scores_of
from headstart.models.linear import Linear
from headstart.models.norm import Norm
from headstart.models.ragged import chained_attention
from headstart.models.rope import RopeConfig, Rotation, rotate, shared_table
from headstart.models.row_attention import attend_allowed

# Scores of all heads that are in memory at one time.
_SCORES = 1 << 23


class Windows(nn.Module):
    """What of a token goes into the entries of windows, and those entries."""

    def __init__(
        self, hidden: int, dim: int, size: int, rope: RopeConfig, eps: float, *, overlaps: bool
    ):
        super().__init__()
        self.dim, self.size, self.rope, self.overlaps = dim, size, rope, overlaps
        wide = dim * (1 + overlaps)
        self.kv = Linear(hidden, 2 * wide)  # values, then gates
        self.bias = nn.Parameter(torch.empty(size, wide), requires_grad=False)  # of gates
        self.norm = Norm(dim, eps)

    @property
    def kept(self) -> int:
        """Numbers that are kept of a token."""
        return 2 * self.bias.shape[1]

    def entries(self, kept: Tensor) -> Tensor:
        """One for each whole window of tokens [n, kept]: [n // size, dim]."""
        count, wide = len(kept) // self.size, torch.promote_types(kept.dtype, torch.float32)
        if count == 0:
            return kept.new_zeros(0, self.dim)
        rows = kept[: count * self.size].unflatten(0, (count, self.size))
        values, gates = rows.chunk(2, dim=-1)
        gates = gates.to(wide) + self.bias.to(wide)
        if self.overlaps:  # a first half counts in the window after its own
            before = values.new_zeros(1, self.size, self.dim)
            closed = gates.new_full((1, self.size, self.dim), -torch.inf)
            values = self._beside(values, before)
            gates = self._beside(gates, closed)
        shares = gates.softmax(dim=1).to(values.dtype)
        made: Tensor = self.norm((values * shares).sum(dim=1))
        return self._turned(made)

    def _beside(self, rows: Tensor, first: Tensor) -> Tensor:
        """Of each window [W, size, 2 * dim] the second half behind the first half of the one
        before: [W, 2 * size, dim]."""
        early, late = rows.chunk(2, dim=-1)
        return torch.cat([torch.cat([first, early[:-1]])[: len(rows)], late], dim=1)

    def _turned(self, entries: Tensor) -> Tensor:
        """Rotated by the places of the windows' first tokens."""
        firsts = torch.arange(len(entries), device=entries.device) * self.size
        table = shared_table(self.rope, len(entries) * self.size, entries.dtype, entries.device)
        return turned(entries.unsqueeze(1), table.at(firsts)).squeeze(1)


class WindowIndexer(nn.Module):
    """Says which windows a row sees: the best so many of those that are complete."""

    def __init__(self, hidden: int, size: int, config: CompressedConfig):
        super().__init__()
        assert config.index is not None
        self.config = config.index
        self.q_up = Linear(config.q_rank, self.config.heads * self.config.dim)
        self.weights = Linear(hidden, self.config.heads)
        self.windows = Windows(
            hidden, self.config.dim, size, config.far_rope, config.eps, overlaps=True
        )

    @torch.no_grad()
    def project(self, x: Tensor, q_latent: Tensor, rotation: Rotation) -> tuple[IndexRows, Tensor]:
        """What rows ask with, and what is kept of them."""
        config, wide = self.config, torch.promote_types(x.dtype, torch.float32)
        q = turned(self.q_up(q_latent).view(len(x), config.heads, config.dim), rotation)
        weights = self.weights(x).to(wide) * config.heads**-0.5
        return IndexRows(q.to(wide) * config.dim**-0.5, weights), self.windows.kv(x)

    @torch.no_grad()
    def choose(self, rows: IndexRows, entries: Tensor, complete: Tensor) -> Tensor:
        """Which entries [W, dim] each row sees, of those before `complete` [R]: [R, W]."""
        ahead = torch.arange(len(entries), device=entries.device) >= complete[:, None]
        if len(entries) <= self.config.top_k:
            return ~ahead
        scores = scores_of(rows, "md", entries.to(rows.q.dtype))
        return best_of(scores.masked_fill_(ahead, -torch.inf), self.config.top_k)


class CompressedAttention(nn.Module):
    def __init__(
        self, hidden: int, heads: int, config: CompressedConfig, *, size: int = 0,
        chooses: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.heads, self.config = heads, config
        dim, eps = config.dim, config.eps
        self.compress = Linear(hidden, config.q_rank + dim)
        self.q_latent_norm = Norm(config.q_rank, eps)
        self.q_up = Linear(config.q_rank, heads * dim)
        self.kv_norm = Norm(dim, eps)
        self.windows = None
        if size:
            self.windows = Windows(hidden, dim, size, config.far_rope, eps, overlaps=chooses)
        self.indexer = WindowIndexer(hidden, size, config) if chooses else None
        self.sinks = nn.Parameter(torch.empty(heads), requires_grad=False)
        # One matrix for each group of heads. No `Linear`: its rows belong to different inputs.
        self.o_groups = nn.Parameter(
            torch.empty(config.groups * config.o_rank, heads // config.groups * dim),
            requires_grad=False,
        )
        self.o = Linear(config.groups * config.o_rank, hidden)
        self.one_by_one = False  # set by backends/torch/exact.py

    def forward(
        self, x: Tensor, rotation: Rotation, context: EntryContext, window: int | None = None
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        assert window is None, "what is near is a part of the layer"
        config = self.config
        q_latent, kv = torch.split(self.compress(x), [config.q_rank, config.dim], dim=-1)
        q_latent = self.q_latent_norm(q_latent)
        q = self.q_up(q_latent).view(len(x), self.heads, config.dim)
        q = turned(rms_norm(q, (config.dim,), eps=config.eps), rotation)
        kept = [turned(self.kv_norm(kv).unsqueeze(1), rotation).squeeze(1)]
        asked = None
        if self.windows is not None:
            kept.append(self.windows.kv(x))
        if self.indexer is not None:
            asked, of_index = self.indexer.project(x, q_latent, rotation)
            kept.append(of_index)
        found = q.new_zeros(q.shape)
        for part in context.seen(torch.cat(kept, dim=-1)):
            mine = None if asked is None else IndexRows(*(each[part.rows] for each in asked))
            found[part.rows] = self._attend(q[part.rows], part, mine)
        back = turned(found, Rotation(rotation.cos, -rotation.sin, rotation.is_interleaved))
        result = self.o(self._by_group(back))
        assert isinstance(result, Tensor)
        return result

    def _by_group(self, x: Tensor) -> Tensor:
        """x [T, heads, dim] -> [T, groups * rank], each group by its own matrix."""
        matrices = self.o_groups.view(self.config.groups, self.config.o_rank, -1)
        grouped = x.reshape(len(x), self.config.groups, -1)
        rows = torch.split(grouped, 1) if self.one_by_one else (grouped,)
        return torch.cat([torch.einsum("tgm,gnm->tgn", part, matrices) for part in rows]).flatten(1)

    def _attend(self, q: Tensor, part: Seen, asked: IndexRows | None) -> Tensor:
        """q [R, heads, dim] -> the same; some rows at a time, so that their scores stay small."""
        dim = self.config.dim
        near = part.stored[:, :dim]
        if part.own is not None:
            assert self.windows is None, "no head has windows"
            keys, own = near.unsqueeze(1), part.own[..., :dim].unsqueeze(2)
            lengths = (len(q),)
            return chained_attention(
                q, keys, keys, own, own, lengths, self.config.near, self.sinks
            )  # fmt: skip
        far, index = near[:0], near[:0]
        if self.windows is not None:
            ends = dim + self.windows.kept
            far = self.windows.entries(part.stored[:, dim:ends])
            if self.indexer is not None:
                index = self.indexer.windows.entries(part.stored[:, ends:])
        before, step = len(near) - len(q), self._rows_at_once(len(far))
        parts = []
        for at in range(0, len(q), step):
            here = slice(at, min(at + step, len(q)))
            some = None if asked is None else IndexRows(*(each[here] for each in asked))
            parts.append(self._some_rows(q[here], near, far, index, before + at, some))
        return torch.cat(parts)

    def _rows_at_once(self, num_far: int) -> int:
        heads = self.heads
        if self.indexer is not None:
            heads = max(heads, self.indexer.config.heads)
        return max(1, _SCORES // (heads * (num_far + 2 * self.config.near)))

    def _some_rows(
        self, q: Tensor, near: Tensor, far: Tensor, index: Tensor, begin: int,
        asked: IndexRows | None,
    ) -> Tensor:  # fmt: skip
        """`begin`: the place of the first row's own token among `near` ones."""
        first = max(0, begin - self.config.near + 1)
        near = near[first : begin + len(q)]
        last = torch.arange(begin, begin + len(q), device=q.device)
        places = torch.arange(first, begin + len(q), device=q.device)
        seen = (places <= last[:, None]) & (places > last[:, None] - self.config.near)
        if self.windows is not None:
            complete = (last + 1) // self.windows.size
            if self.indexer is not None and asked is not None:
                chosen = self.indexer.choose(asked, index, complete)
            else:
                chosen = torch.arange(len(far), device=q.device) < complete[:, None]
            near, seen = torch.cat([near, far]), torch.cat([seen, chosen], dim=1)
        keys = near.unsqueeze(1)
        return attend_allowed(q, keys, keys, seen, self.sinks)


def turned(x: Tensor, rotation: Rotation) -> Tensor:
    """x [T, heads, D] with its last numbers rotated."""
    still = x.shape[-1] - rotation.cos.shape[-1]
    return torch.cat([x[..., :still], rotate(x[..., still:], *rotation)], dim=-1)
