"""The tensors: weights, K/V memory, and the two forward passes over a ragged batch.

Everything the scheduler plans in ints becomes rows here. Slots of a request that lie in
consecutive blocks are addressed as a slice, others through a list of places; the result is the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from headstart.engine.head_rows import DraftChain, HeadRows
from headstart.engine.request import Request
from headstart.engine.scheduler import Work
from headstart.engine.slots import slots_of
from headstart.engine.verifier import Chooser
from headstart.engine.wanted_rows import WantedRows
from headstart.models.attention import LayerCache, PagedContext, Span, empty_cache
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.exact import BLOCK_ROWS, ExactContext, OneRow, fill_up
from headstart.models.layers import LayerContext
from headstart.models.linear import Int8Linear, Linear
from headstart.models.mtp import MTPHead
from headstart.models.recurrence import (
    LayerStates,
    Recurrence,
    SlotRecurrence,
    StateSpan,
    empty_states,
    first_rows,
)
from headstart.models.trunk import Trunk


@dataclass(frozen=True)
class DraftVocab:
    """Reduced LM heads for drafting, by module: row i is token ids[i]."""

    ids: torch.Tensor
    lm_heads: tuple[Linear | Int8Linear, ...]

    @property
    def lm_head(self) -> Linear | Int8Linear:
        return self.lm_heads[0]


class Runner:
    """Owns the device memory of one engine."""

    note = ""  # about how it computes, for people
    chooser: Chooser | None = None  # where the choice at a row has to be made in a special way
    chain: DraftChain | None = None  # where greedy drafts of all depths can be made at once

    def __init__(
        self,
        trunk: Trunk,
        head: MTPHead | None,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        is_exact: bool = False,
        num_states: int = 0,
    ):
        self.trunk_model, self.head, self._is_exact = trunk, head, is_exact
        self.block_size, self.dtype = block_size, dtype
        self.device = trunk.embed.device
        config = trunk.config
        slots = num_blocks * block_size
        modules = head.num_modules if head is not None else 0
        # Same slots everywhere, but the head's K/V may have another shape than the trunk's.
        self._caches = [
            self._cache(slots, config, kind) for kind in config.layers if kind.mixer != "delta"
        ]
        self.num_states = num_states if config.num_recurrent else 0
        self._states: list[LayerStates] = [
            empty_states(config.delta, num_states, dtype, self.device)
            for _ in range(config.num_recurrent)
            if config.delta is not None
        ]
        self._head_caches = [
            self._cache(slots, head.config, head.config.head_layer) for _ in range(modules) if head
        ]
        # Per block and module the state that the slot after the block needs.
        self._boundary = torch.zeros(
            num_blocks, modules, config.hidden, dtype=dtype, device=self.device
        )
        # Products in int8 give a row the same bits alone and among others; so should attention.
        self._lone_rows = isinstance(trunk.lm_head, Int8Linear)
        self.drafts_in_int8 = False  # whether few drafts come from rounded weights
        self.draft_vocabs: dict[str, DraftVocab] = {}

    def _cache(self, slots: int, config: ModelConfig, kind: LayerKind) -> LayerCache:
        return empty_cache(config.kept(kind), slots, self.dtype, self.device)

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    @property
    def is_parallel(self) -> bool:
        return self.head is not None and self.head.layout.topology == "parallel"

    def trunk(self, works: Sequence[Work]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run all rows; returns the states that feed a head, if any, per work, and all logits."""
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        for work in works:
            request, start = work.request, len(ids)
            if work.drafts:
                ids += [request.tokens[-1], *work.drafts]
            else:
                ids += request.tokens[work.start : work.stop]
            positions += range(work.start, work.stop)
            spans.append(self._span(request, start, work.start, work.count, first=0))
        own = [_state_span(span, w) for span, w in zip(spans, works, strict=True) if w.states]
        run = self._run_blocks if self._is_exact else self._run_rows
        wanted = WantedRows.about(works, has_head=self.head is not None)
        stream, normed, logits = run(ids, positions, spans, wanted, own)
        before = self.head is not None and self.head.layout.trunk_hidden == "before_final_norm"
        states = stream if before else normed
        if states.shape[0] < len(ids):
            return [states[part] for part in wanted.parts], logits
        return [states[s.start : s.stop] for s in spans], logits

    def _contexts(
        self,
        attending: Callable[[LayerCache], PagedContext | ExactContext],
        going_on: Callable[..., Recurrence],
    ) -> list[LayerContext]:
        """One for every layer: what its rows see, or what they go on from."""
        caches, states = iter(self._caches), iter(self._states)
        return [
            going_on(next(states)) if kind.mixer == "delta" else attending(next(caches))
            for kind in self.trunk_model.config.layers
        ]

    def _run_rows(
        self,
        ids: list[int],
        positions: list[int],
        spans: list[Span],
        wanted: WantedRows,
        states: list[StateSpan],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All rows in one pass; returns states before and after the final norm, and logits.

        The states are those of all rows, or of those that are wanted.
        """
        short = first_rows(states)
        starts = self._numbers(short) if short else None
        stream = self.trunk_model(
            torch.tensor(ids, device=self.device),
            torch.tensor(positions, device=self.device),
            self._contexts(
                lambda cache: PagedContext(cache, spans, self._lone_rows),
                lambda own: SlotRecurrence(own, states, starts=starts),
            ),
        )
        normed = self.trunk_model.final_norm(stream)
        rows = normed if len(wanted.logits) == len(ids) else normed[wanted.logits]
        return stream, normed, self.trunk_model.logits(rows)

    def _run_blocks(
        self,
        ids: list[int],
        positions: list[int],
        spans: list[Span],
        wanted: WantedRows,
        states: list[StateSpan],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same in blocks of constant size, so that no row's bits depend on their number."""
        lone = [part for span in spans for part in span.by_row()]
        places = [OneRow(part.first_slot, part.context) for part in lone]
        streams, normeds, logits = [], [], []
        for start in range(0, len(ids), BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            count = len(ids[part])
            rows_here = places[part]
            # The slot after the last row may hold what the next block of rows goes on from.
            cut = (own.between(part.start, part.stop, own.keeps[-1][1]) for own in states)
            going_on = [own for own in cut if own is not None]
            stream = self.trunk_model(
                torch.tensor(fill_up(ids[part]), device=self.device),
                torch.tensor(fill_up(positions[part]), device=self.device),
                self._contexts(
                    partial(ExactContext, rows=rows_here),
                    partial(SlotRecurrence, spans=going_on, one_by_one=True),
                ),
            )
            normed = self.trunk_model.final_norm(stream)
            rows = [row - start for row in wanted.logits if start <= row < start + count]
            if rows:
                logits.append(self.trunk_model.logits(normed)[rows])
            streams.append(stream[:count])
            normeds.append(normed[:count])
        none = logits or [self.trunk_model.logits(normeds[0][:0])]
        return torch.cat(streams), torch.cat(normeds), torch.cat(none)

    def head_pass(
        self, module: int, rows: Sequence[HeadRows]
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Run one module; returns states for the LM head, recycled states, and each last row."""
        inputs, spans = self._head_inputs(module, rows)
        normed, recycled = self._run_module(module, *inputs, spans)
        return normed, recycled, [span.stop - 1 for span in spans]

    def fill_head(self, module: int, rows: Sequence[HeadRows]) -> None:
        """The same where only the module's own memory is wanted, not what it would say."""
        inputs, spans = self._head_inputs(module, rows)
        self._fill_module(module, *inputs, spans)

    def _head_inputs(
        self, module: int, rows: Sequence[HeadRows]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], list[Span]]:
        """Token ids, hidden states and rotary positions of all rows."""
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
        hidden = rows[0].states if len(rows) == 1 else torch.cat([part.states for part in rows])
        return (self._numbers(ids), hidden, self._numbers(positions)), spans

    def _run_module(
        self, module: int, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor,
        spans: list[Span],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """States for the LM head, and those that feed the next depth."""
        assert self.head is not None
        context = PagedContext(self._head_caches[module], spans)
        embedded, rotary = self.trunk_model.embed[ids], self.trunk_model.rotary
        normed, recycled = self.head.modules_[module](embedded, hidden, positions, rotary, context)
        return normed, recycled

    def _fill_module(
        self, module: int, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor,
        spans: list[Span],
    ) -> None:  # fmt: skip
        """Write what the rows leave in the module's memory."""
        self._run_module(module, ids, hidden, positions, spans)

    def _lm_head(self, module: int) -> Linear | Int8Linear:
        """The module's own where it has one, else the trunk's."""
        assert self.head is not None
        own = self.head.modules_[module].lm_head
        return own if isinstance(own, Linear | Int8Linear) else self.trunk_model.lm_head

    def draft_logits(
        self, normed: torch.Tensor, vocab: str | None, module: int = 0
    ) -> torch.Tensor:
        """Logits for drafting, over the whole vocabulary or a reduced one."""
        lm_head = self._lm_head(module)
        if vocab is None and lm_head is self.trunk_model.lm_head:
            return self.trunk_model.logits(normed)
        result = (lm_head if vocab is None else self.draft_vocabs[vocab].lm_heads[module])(normed)
        assert isinstance(result, torch.Tensor)
        return result if result.dtype == torch.float64 else result.float()

    def save_boundaries(self, blocks: list[int], module: int, states: torch.Tensor) -> None:
        """Keep, for each block, the state [n, hidden] that the slot after it needs."""
        self._boundary[self._numbers(blocks), module] = states

    def boundary(self, block: int) -> torch.Tensor:
        return self._boundary[block]

    def add_draft_vocab(self, name: str, ids: Sequence[int]) -> None:
        chosen = torch.tensor(sorted(set(ids)), device=self.device)
        assert self.head is not None
        heads = [self._lm_head(module) for module in range(self.head.num_modules)]
        made = {id(head): head.only_rows(chosen) for head in heads}  # once, where they share it
        self.draft_vocabs[name] = DraftVocab(chosen, tuple(made[id(head)] for head in heads))

    def _span(self, request: Request, row: int, slot: int, count: int, *, first: int) -> Span:
        new, context = (
            slots_of(request.blocks, self.block_size, begin, slot + count, self._numbers)
            for begin in (slot, first)
        )
        return Span(row, row + count, new, context)


def _state_span(span: Span, work: Work) -> StateSpan:
    assert work.states is not None
    return StateSpan(span.start, span.stop, work.states.source, work.states.keeps)
