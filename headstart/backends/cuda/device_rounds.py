"""Rounds of one engine on a GPU: the batch on the device, captured graphs, results under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headstart.backends.cuda.decode_batch import WINDOW, DecodeBatch
from headstart.backends.cuda.exact import ExactKernels
from headstart.backends.cuda.exact_recurrent import exact_repeat
from headstart.backends.cuda.graphs import Graphs
from headstart.backends.cuda.kernels.logprobs import MAX_LOGPROBS
from headstart.backends.cuda.launched import LaunchedRound, WaitingRound, mark
from headstart.backends.cuda.mask_copies import MaskCopies
from headstart.backends.cuda.packed import (
    MOST_GROUPS,
    MOST_JOINED_ROWS,
    best_rows,
    joinable_rows,
    num_groups,
    num_rows,
    starts_of,
)
from headstart.backends.cuda.recurrent import RecurrentBatch, repeat, settle
from headstart.backends.cuda.round_plans import RoundPlans
from headstart.backends.cuda.round_profile import BlankRounds, copying_shapes, profiled_shapes
from headstart.backends.cuda.sampling import PLAIN, SamplingNeeds, choose_rows
from headstart.backends.cuda.shapes import RoundShape, TrunkShape
from headstart.backends.cuda.warm_up import compile_all, rehearse
from headstart.backends.rounds import (
    DeviceRounds,
    GivenCopy,
    HeadStates,
    Launched,
    RoundMasks,
    RoundRequest,
    RoundSizes,
    SizeTimes,
)
from headstart.backends.rows import TrunkOutput, TrunkRows
from headstart.backends.scores import to_host
from headstart.models.linear_attention import DeltaNet
from headstart.sampling.params import Row, SamplingParams

if TYPE_CHECKING:
    from headstart.backends.cuda.backend import CudaBackend

_MANY_ROWS = 256  # of a round, from which on arithmetic takes the time: few rows more cost more
# Of prompts that wait: more are read in a pass of their own, in which all are read sooner than a
# part of them beside each round would be; answers under way wait for that pass.
MANY_PROMPT_ROWS = MOST_JOINED_ROWS


class CapturedRounds(DeviceRounds):
    """Rounds of one engine's requests, as CUDA graphs; the host launches, and reads them later."""

    def __init__(self, backend: CudaBackend, sizes: RoundSizes, recurrent: RecurrentBatch | None):
        self.sizes, self.window, self.backend = sizes, WINDOW, backend
        self.joins_prompts = backend.joins_prompts
        self.cache, self.vocab = backend.sizes, backend.config.vocab
        block_size = backend.sizes.block_size
        self.batch = DecodeBatch.for_rounds(
            sizes, backend.config, window=WINDOW, block_size=block_size, dtype=backend.dtype,
            device=backend.device, recurrent=recurrent, modules=backend.num_modules,
            packs=backend.joins_prompts,
        )  # fmt: skip
        max_context = self.batch.tables.shape[1] * block_size
        self.graphs = Graphs(backend.round_model(max_context), self.batch)
        self._vocabs: dict[str | None, int] = {}  # numbers of draft vocabularies
        self._vocab_number(sizes.draft_vocab)
        self._plans = RoundPlans(self.graphs, sizes, window=WINDOW, widest=self.batch.window)
        self.menu = self._plans.menu
        self._params: list[SamplingParams] = []  # by index
        self._needs: list[SamplingNeeds] = []  # by index
        self._waiting: WaitingRound | None = None  # for masks
        self._copies = MaskCopies(self.batch.masks)
        self._limits: list[int] = []  # drafts by index, as the device knows them
        self.pass_seconds: dict[int, float] = {}  # of passes over prompts alone, by rows

    def why_not(self, params: SamplingParams) -> str | None:
        if params.logprobs is not None and params.logprobs > MAX_LOGPROBS:
            return f"log-probabilities of more than {MAX_LOGPROBS} alternatives"
        return None

    def choose_first(self, logits: Tensor, rows: Sequence[Row]) -> tuple[list[Tensor], Launched]:
        chosen = choose_rows(logits, rows, with_logprobs=True)
        counted = torch.stack([torch.ones_like(chosen.tokens), chosen.tokens], dim=1)
        launched = LaunchedRound(tops=[self._top(row.params) for row in rows])
        launched.copy_out(counted, chosen.logprobs)
        return list(chosen.tokens.clamp_min(0).unbind()), launched

    def _top(self, params: SamplingParams) -> int | None:
        """Alternatives of a token that there are."""
        return None if params.logprobs is None else min(params.logprobs, self.vocab)

    def admit(self, request: RoundRequest) -> None:
        index = len(self._params)
        params, vocab = request.row.params, self._vocab_number(request.draft_vocab)
        self.batch.admit(index, request, self.backend.memory.states, vocab=vocab)
        self._params.append(params)
        self._needs.append(SamplingNeeds.of(params, has_grammar=request.has_grammar, vocab=vocab))
        self._limits = []
        if request.states is not None:
            self._plans.came()

    def _vocab_number(self, name: str | None) -> int:
        """A draft vocabulary is made ready when the first request asks for it."""
        if name not in self._vocabs:
            self.graphs.model.drafting.append(self.backend.draft_tokens(name))
            self._vocabs[name] = len(self._vocabs)
        return self._vocabs[name]

    def remove(self, index: int) -> None:
        last = len(self._params) - 1
        self._limits = []
        if index == last:
            self.batch.remove(index)
        else:
            self.batch.move(last, index)
            self._params[index], self._needs[index] = self._params[last], self._needs[last]
        del self._params[last], self._needs[last]
        if not self._params:
            self._plans.all_left()

    def extend(self, blocks: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        self.batch.extend(blocks)

    def max_ahead(self, drafts: Sequence[int]) -> int:
        return self._plans.max_ahead(drafts)

    def joins(self, rows: Sequence[TrunkRows]) -> bool:
        return self.joins_prompts and num_groups(rows) <= MOST_GROUPS

    def fitting_rows(self, counts: Sequence[int]) -> int:
        own, wanted = self._plans.rows_under_way(len(self._params)), sum(counts)
        if not self.joins_prompts or own < _MANY_ROWS or wanted > MANY_PROMPT_ROWS:
            return wanted
        return best_rows(own, joinable_rows(counts), self.pass_seconds)

    def give(self, copies: Mapping[int, GivenCopy], most: int, rows: int) -> None:
        if self._plans.give(copies.keys(), most, rows):
            self.batch.give(copies)

    def launch(self, drafts: Sequence[int], rows: Sequence[TrunkRows] = ()) -> Launched:
        self._waiting = None  # one that a failed step left is forgotten
        needs = reduce(or_, self._needs)
        # Beside prompts all have as many rows.
        plan = self._plans.plan(drafts, needs, squeezes=self.joins_prompts and not rows)
        shape = plan.shape
        if plan.limits != self._limits:
            self._limits = plan.limits
            self.batch.limit(plan.limits)
        tops = [self._top(params) for params in self._params]
        launched = LaunchedRound(tops, drafts=plan.drafts, num_unread=plan.num_unread)
        if rows or needs.has_masks:
            self._launch_parts(launched, shape, rows)
            return launched
        launched.began = mark(self.backend.device)
        is_replay = self.graphs.run(shape) and not shape.num_copied
        # Rounds that process logits would say too much of what usual ones cost.
        if is_replay and needs == PLAIN and self._plans.is_usual(shape):
            launched.shape = shape
        self._end(launched, shape)
        return launched

    def _launch_parts(
        self, launched: LaunchedRound, shape: RoundShape, rows: Sequence[TrunkRows]
    ) -> None:
        """Drafts, which the host gets at once if it makes masks, the trunk's pass, the choice."""
        self.graphs.run_part(shape.drafts)
        if shape.needs.has_masks:
            count = len(launched.drafts)
            drafts, made = to_host(self.batch.ids[:count]), to_host(self.batch.drafted[:count])
            self._waiting = WaitingRound(launched, shape, drafts, made, mark(self.backend.device))
        if rows:
            launched.joined = self._run_packed(shape.trunk, len(launched.drafts), rows)
        else:
            self.graphs.run_part(shape.trunk)
        if not shape.needs.has_masks:
            self.graphs.run_part(shape.choice)
            self._end(launched, shape)

    def read(self, rows: Sequence[TrunkRows]) -> TrunkOutput:
        return self._run_packed(TrunkShape(0, 0), 0, rows)

    def _run_packed(self, part: TrunkShape, count: int, rows: Sequence[TrunkRows]) -> TrunkOutput:
        """One pass over the rows of `count` requests in rounds and these; what it gave the latter.

        The next pass writes to the same tensors.
        """
        first, packed = count * (part.num_drafts + 1), self.batch.packed
        shape = self.graphs.packed_shape(part, first + num_rows(rows), num_groups(rows))
        packed.fill(first, rows, self.cache.block_size, rows=shape.rows, groups=shape.groups)
        self.graphs.run_part(shape)
        begins = [first + start for start in starts_of(rows)]
        ends = [begin + len(own.tokens) for begin, own in zip(begins, rows, strict=True)]
        wanted = [
            row for end, own in zip(ends, rows, strict=True)
            for row in range(end - own.num_logits, end)
        ]  # fmt: skip
        states = packed.stream if self.backend.feeds_stream else packed.normed
        logits = self.backend.logits(packed.normed[self.backend.to_device(wanted)])
        return [states[at:end].clone() for at, end in zip(begins, ends, strict=True)], logits

    def _end(self, launched: LaunchedRound, shape: RoundShape) -> None:
        """Copies of the outcome for the host."""
        count, logprobs = len(launched.drafts), None
        if shape.needs.has_logprobs:
            rows = count * shape.num_rows
            logprobs = self.batch.logprobs[:rows], self.batch.logprob_ids[:rows]
        made = self.batch.made if self.batch.copies is not None else None
        launched.copy_out(self.batch.emitted[:count], logprobs, made)

    def is_drafting(self) -> bool:
        waiting = self._waiting
        return waiting is not None and waiting.drafted is not None and not waiting.drafted.query()

    def drafted(self) -> list[list[int]] | None:
        waiting = self._waiting
        if waiting is None:
            return None
        if waiting.drafted is not None:
            waiting.drafted.synchronize()
        return waiting.drafts()

    def mask_room(self, rows: int, words: int) -> np.ndarray:
        return self._copies.room(rows, words)

    def choose(self, masks: RoundMasks) -> None:
        waiting, self._waiting = self._waiting, None
        assert waiting is not None, "a round waits only where a request has a grammar"
        if masks.requests:
            self._copies.copy(masks, waiting.shape.num_rows, count=self.batch.count)
            if short := waiting.cut_short(masks):
                self.batch.cut_drafts(short)
                self._limits = []  # those may be what was cut
        self.graphs.run_part(waiting.shape.choice)
        self._end(waiting.launched, waiting.shape)

    def drain(self, lengths: Sequence[int]) -> list[HeadStates | None]:
        if self.batch.recurrent is not None and lengths:
            nets = [m for m in self.backend.trunk.modules() if isinstance(m, DeltaNet)]
            is_exact = isinstance(self.backend.kernels, ExactKernels)
            settle(
                nets, self.batch.recurrent, self.backend.memory.states, list(lengths),
                exact_repeat if is_exact else repeat,
            )  # fmt: skip
        states: list[HeadStates | None] = []
        for index in range(len(self._params)):
            pending = int(self.batch.pending[index])
            own = self.batch.states[index, :pending].clone(), self.batch.carried[index].clone()
            states.append(HeadStates(*own) if pending and self.graphs.has_head else None)
            self.batch.remove(index)
        self._params, self._needs, self._limits = [], [], []
        self._plans.drained()
        return states

    def bucket(self, count: int) -> int:
        return self.graphs.bucket(count)

    @torch.inference_mode()
    def warm_up(self) -> None:
        usual = [RoundShape.usual(size, self.sizes.num_drafts) for size in self.graphs.sizes()]
        shapes = profiled_shapes(self) if self.menu else usual
        if self.backend.device.type == "cuda":
            compile_all(self, shapes, copying_shapes(self))
        # Those of the menu are captured while timed. The largest comes first: its scratch memory
        # serves the others.
        for shape in [] if self.menu else reversed(usual):
            for _ in range(2):  # as it is; then captured
                self.graphs.run(shape)
        rehearse(self)

    def time_passes(self) -> tuple[tuple[int, float], ...]:
        """Of those that a round may be, by the memory that was planned."""
        return tuple(
            sorted(own for own in self.pass_seconds.items() if own[0] <= self._plans.max_rows)
        )

    @torch.inference_mode()
    def time_rounds(self) -> list[SizeTimes]:
        return BlankRounds(self, self.backend.sizes).times()
