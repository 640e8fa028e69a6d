"""The tensors: weights, K/V memory, and the two forward passes over a ragged batch.

Everything the scheduler plans in ints becomes rows here. Slots of a request that lie in
consecutive blocks are addressed as a slice, others through a list of places; the result is the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headstart.engine.request import Request
from headstart.engine.scheduler import Work
from headstart.models.attention import LayerCache, PagedContext, Places, Span
from headstart.models.linear import Int8Linear, Linear
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk


@dataclass(frozen=True)
class DraftVocab:
    """A reduced LM head for drafting: row i is token ids[i]."""

    ids: torch.Tensor
    lm_head: Linear | Int8Linear


@dataclass(frozen=True)
class HeadRows:
    """Rows of one request for one module of the head: slots [start, start + len(tokens))."""

    request: Request
    start: int
    tokens: list[int]
    states: torch.Tensor  # [n, hidden]


class Runner:
    """Owns the device memory of one engine."""

    def __init__(
        self,
        trunk: Trunk,
        head: MTPHead | None,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ):
        self.trunk_model, self.head = trunk, head
        self.block_size, self.dtype = block_size, dtype
        self.device = trunk.embed.device
        config = trunk.config
        shape = (num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self._caches = [self._cache(shape) for _ in range(config.num_layers)]
        modules = head.num_modules if head is not None else 0
        self._head_caches = [self._cache(shape) for _ in range(modules)]
        # Per block and module the state that the slot after the block needs.
        self._boundary = torch.zeros(
            num_blocks, modules, config.hidden, dtype=dtype, device=self.device
        )
        self.draft_vocabs: dict[str, DraftVocab] = {}

    def _cache(self, shape: tuple[int, int, int]) -> LayerCache:
        # Zeros, not garbage: a masked NaN would still spoil a product.
        empty = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
        return LayerCache(*empty)

    @property
    def is_parallel(self) -> bool:
        return self.head is not None and self.head.layout.topology == "parallel"

    def trunk(self, works: Sequence[Work]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run all rows; returns the states that feed a head, per work, and all logits needed."""
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        wanted: list[int] = []
        for work in works:
            request, start = work.request, len(ids)
            if work.drafts:
                ids += [request.tokens[-1], *work.drafts]
            else:
                ids += request.tokens[work.start : work.stop]
            positions += range(work.start, work.stop)
            spans.append(self._span(request, start, work.start, work.count, first=0))
            wanted += range(len(ids) - work.num_logits, len(ids))
        stream = self.trunk_model(
            torch.tensor(ids, device=self.device),
            torch.tensor(positions, device=self.device),
            [PagedContext(cache, spans) for cache in self._caches],
        )
        normed = self.trunk_model.final_norm(stream)
        before = self.head is not None and self.head.layout.trunk_hidden == "before_final_norm"
        states = stream if before else normed
        rows = normed if len(wanted) == len(ids) else normed[wanted]
        return [states[s.start : s.stop] for s in spans], self.trunk_model.logits(rows)

    def head_pass(
        self, module: int, rows: Sequence[HeadRows]
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Run one module; returns states for the LM head, recycled states, and each last row."""
        assert self.head is not None
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        for part in rows:
            start = len(ids)
            ids += part.tokens
            positions += range(part.start - module - 1, part.start - module - 1 + len(part.tokens))
            spans.append(
                self._span(part.request, start, part.start, len(part.tokens), first=module + 1)
            )
        embedded = self.trunk_model.embed[torch.tensor(ids, device=self.device)]
        hidden = rows[0].states if len(rows) == 1 else torch.cat([part.states for part in rows])
        normed, recycled = self.head.modules_[module](
            embedded,
            hidden,
            torch.tensor(positions, device=self.device),
            self.trunk_model.rotary,
            PagedContext(self._head_caches[module], spans),
        )
        return normed, recycled, [span.stop - 1 for span in spans]

    def draft_logits(self, normed: torch.Tensor, vocab: str | None) -> torch.Tensor:
        """Logits for drafting, over the whole vocabulary or a reduced one."""
        if vocab is None:
            return self.trunk_model.logits(normed)
        result = self.draft_vocabs[vocab].lm_head(normed)
        assert isinstance(result, torch.Tensor)
        return result if result.dtype == torch.float64 else result.float()

    def save_boundary(self, request: Request, module: int, slot: int, state: torch.Tensor) -> None:
        """Keep what the slot after `slot` needs, if `slot` is the last of a block."""
        if (slot + 1) % self.block_size == 0:
            self._boundary[request.blocks[slot // self.block_size], module] = state

    def boundary(self, block: int) -> torch.Tensor:
        return self._boundary[block]

    def add_draft_vocab(self, name: str, ids: Sequence[int]) -> None:
        chosen = torch.tensor(sorted(set(ids)), device=self.device)
        self.draft_vocabs[name] = DraftVocab(chosen, self.trunk_model.lm_head.only_rows(chosen))

    def _span(self, request: Request, row: int, slot: int, count: int, *, first: int) -> Span:
        return Span(
            row,
            row + count,
            self._places(request, slot, slot + count),
            self._places(request, first, slot + count),
        )

    def _places(self, request: Request, begin: int, end: int) -> Places:
        """Physical slots of logical ones [begin, end)."""
        size, blocks = self.block_size, request.blocks
        lowest, highest = begin // size, (end - 1) // size
        if blocks[highest] - blocks[lowest] == highest - lowest and _is_run(
            blocks, lowest, highest
        ):
            offset = (blocks[lowest] - lowest) * size
            return slice(begin + offset, end + offset)
        logical = torch.arange(begin, end)
        table = torch.tensor(blocks)
        return (table[logical // size] * size + logical % size).to(self.device)


def _is_run(blocks: list[int], lowest: int, highest: int) -> bool:
    first = blocks[lowest]
    return blocks[lowest : highest + 1] == list(range(first, first + highest - lowest + 1))
