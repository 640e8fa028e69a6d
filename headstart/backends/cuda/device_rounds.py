"""Rounds of one engine on a GPU: the batch on the device, captured graphs, results under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.graphs import Graphs, RoundShapes
from headstart.backends.cuda.kernels.logprobs import MAX_LOGPROBS
from headstart.backends.cuda.recurrent import RecurrentBatch, settle
from headstart.backends.cuda.round_profile import BlankRounds, profiled_shapes
from headstart.backends.cuda.rounds import RoundShape, run_round
from headstart.backends.cuda.sampling import SamplingNeeds, choose_rows
from headstart.backends.rounds import (
    DeviceRounds,
    Emitted,
    Launched,
    RoundRequest,
    RoundSizes,
    RoundTiming,
    SizeTimes,
)
from headstart.backends.rows import HeadRows, TrunkRows
from headstart.models.linear_attention import DeltaNet
from headstart.sampling.params import Row, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from headstart.backends.cuda.backend import CudaBackend

WINDOW = 16  # tokens that the head may be behind while no request drafts
_WARM_ROWS = 64  # of a pass that only compiles


@dataclass(frozen=True)
class LaunchedRound:
    """A result on its way to the host: per request a count, and so many tokens."""

    emitted: Tensor  # [B, 1 + R]
    done: torch.cuda.Event | None
    tops: list[int | None]  # alternatives that each request asks for, None: no log-probabilities
    logprobs: tuple[Tensor, Tensor] | None = None  # [B * R', ...], R' rows of each request
    drafts: list[int] = field(default_factory=list)
    num_unread: int = 0
    shape: RoundShape | None = None  # of a round whose time counts,
    began: torch.cuda.Event | None = None  # and since when

    def collect(self) -> list[Emitted]:
        if self.done is not None:
            self.done.synchronize()
        tokens = [row[1 : 1 + row[0]] for row in self.emitted.tolist()]
        if self.logprobs is None:
            return [Emitted(own) for own in tokens]
        return [Emitted(own, self._logprobs(index, own)) for index, own in enumerate(tokens)]

    def _logprobs(self, index: int, tokens: list[int]) -> list[TokenLogprob]:
        top = self.tops[index] if index < len(self.tops) else None
        if top is None or self.logprobs is None:
            return []
        values, ids = self.logprobs
        first = index * (len(values) // len(self.emitted))
        found = []
        for row, token in enumerate(tokens, first):
            own, *others = values[row, : 1 + top].tolist()
            found.append(
                TokenLogprob(token, own, dict(zip(ids[row].tolist(), others, strict=False)))
            )
        return found

    def timing(self) -> RoundTiming | None:
        if self.shape is None or self.began is None or self.done is None:
            return None
        seconds = float(self.began.elapsed_time(self.done)) / 1e3
        return RoundTiming(self.shape.count, self.shape.num_drafts, seconds)


class CapturedRounds(DeviceRounds):
    def __init__(self, backend: CudaBackend, sizes: RoundSizes, recurrent: RecurrentBatch | None):
        self.sizes, self.window, self._backend = sizes, WINDOW, backend
        block_size = backend.sizes.block_size
        max_blocks = -(-(sizes.max_tokens + 2 * sizes.max_drafts + 2) // block_size)
        self.batch = DecodeBatch(
            sizes.max_requests, max_drafts=sizes.max_drafts,
            window=max(WINDOW, sizes.max_drafts + 1), max_blocks=max_blocks,
            hidden=backend.config.hidden, vocab=backend.config.vocab, dtype=backend.dtype,
            device=backend.device, recurrent=recurrent,
        )  # fmt: skip
        model = backend.round_model(max_blocks * block_size, sizes.draft_vocab)
        self.graphs = Graphs(model, self.batch)
        self.menu = [drafts for drafts in sizes.menu if drafts <= sizes.max_drafts]
        self.shapes = RoundShapes(self.graphs, WINDOW, self.menu, widest=self.batch.window)
        self._params: list[SamplingParams] = []  # by index
        self._limits: list[int] = []  # drafts by index, as the device knows them
        self._last_drafts = 0  # the most of any request in the last round
        self._pending = 0  # the most tokens that any request's head may be behind

    def why_not(self, params: SamplingParams, draft_vocab: str | None) -> str | None:
        if params.acceptance != "match":
            return f"acceptance rule {params.acceptance}"
        if params.logprobs is not None and params.logprobs > MAX_LOGPROBS:
            return f"log-probabilities of more than {MAX_LOGPROBS} alternatives"
        if self.graphs.has_head and draft_vocab != self.sizes.draft_vocab:
            return f"draft vocabulary {draft_vocab}"
        drafts = params.speculate if isinstance(params.speculate, int) else 0
        return f"{drafts} drafts" if drafts > self.sizes.max_drafts else None

    def choose_first(self, logits: Tensor, rows: Sequence[Row]) -> tuple[list[Tensor], Launched]:
        chosen = choose_rows(logits, rows, with_logprobs=True)
        counted = torch.stack([torch.ones_like(chosen.tokens), chosen.tokens], dim=1)
        tops = [row.params.logprobs for row in rows]
        launched = self._copied(counted, tops, chosen.logprobs)
        return list(chosen.tokens.clamp_min(0).unbind()), launched

    def admit(self, request: RoundRequest) -> None:
        index = len(self._params)
        self._params.append(request.row.params)
        self.batch.admit(index, request, self._backend.memory.states)
        self._limits = []
        if request.state is not None:
            self._pending = max(self._pending, 1)

    def remove(self, index: int) -> None:
        last = len(self._params) - 1
        self._limits = []
        if index == last:
            self.batch.remove(index)
        else:
            self.batch.move(last, index)
            self._params[index] = self._params[last]
        del self._params[last]
        if not self._params:  # the next request brings one token that its head has not read
            self._pending = 0

    def extend(self, index: int, start: int, blocks: Sequence[int]) -> None:
        self.batch.extend(index, start, blocks)

    def max_ahead(self, drafts: Sequence[int]) -> int:
        # A first token, too, may not have arrived at the host yet.
        return (self._last_drafts + 1) + (max(drafts) + 1) + 1

    def launch(self, drafts: Sequence[int]) -> Launched:
        count = len(self._params)
        needs = SamplingNeeds.of(self._params)
        shape = self.shapes.pick(count, max(drafts), self._pending, needs)
        limits = [min(number, shape.num_drafts) for number in drafts]
        most = self._last_drafts = max(limits)
        if limits != self._limits:
            self._limits = limits
            self.batch.limit(limits)
        began = self._mark()
        is_replay = self.graphs.run(shape)
        num_unread = 0 if shape.head_rows or not self.graphs.has_head else self._pending
        self._pending = most + 1 if shape.head_rows else self._pending + 1
        is_timed = is_replay and self.shapes.is_usual(shape, most)
        launched = self._copied(
            self.batch.emitted[:count], [p.logprobs for p in self._params],
            self._logprobs(count * (shape.num_drafts + 1)) if needs.has_logprobs else None,
        )  # fmt: skip
        return replace(
            launched, drafts=limits, num_unread=num_unread, shape=shape if is_timed else None,
            began=began,
        )  # fmt: skip

    def _logprobs(self, rows: int) -> tuple[Tensor, Tensor]:
        return self.batch.logprobs[:rows], self.batch.logprob_ids[:rows]

    def drain(self, lengths: Sequence[int]) -> list[Tensor | None]:
        if self.batch.recurrent is not None and lengths:
            nets = [m for m in self._backend.trunk.modules() if isinstance(m, DeltaNet)]
            settle(nets, self.batch.recurrent, self._backend.memory.states, list(lengths))
        states: list[Tensor | None] = []
        for index in range(len(self._params)):
            pending = int(self.batch.pending[index])
            states.append(self.batch.states[index, :pending].clone() if pending else None)
            self.batch.remove(index)
        self._params, self._limits, self._pending = [], [], 0
        return states

    def bucket(self, count: int) -> int:
        return self.graphs.bucket(count)

    @torch.inference_mode()
    def warm_up(self) -> None:
        usual = [RoundShape.usual(size, self.sizes.num_drafts) for size in self.graphs.sizes()]
        shapes = profiled_shapes(self) if self.menu else usual
        if self._backend.device.type == "cuda":
            self._compile(shapes)
        self._read_blank()
        for shape in [] if self.menu else usual:  # those of the menu are captured while timed
            for _ in range(2):  # as it is; then captured
                self.graphs.run(shape)

    @torch.inference_mode()
    def time_rounds(self) -> list[SizeTimes]:
        return BlankRounds(self, self._backend.sizes).times()

    def _compile(self, shapes: Sequence[RoundShape]) -> None:
        """All kernels of a pass over prompts and of these rounds, side by side."""
        from headstart.backends.cuda.compiling import compiled_together, thinned

        model = thinned(self.graphs.model)
        with compiled_together():
            self._read_blank()
            for shape in shapes:
                run_round(model, self.batch, shape)

    def _read_blank(self) -> None:
        """A short blank prompt, by trunk and head."""
        sizes = self._backend.sizes
        count = max(1, min(_WARM_ROWS, sizes.num_blocks * sizes.block_size // 2))
        blocks = range(-(-count // sizes.block_size))
        tokens = [0] * count
        (states,), _ = self._backend.trunk_pass([TrunkRows(tokens, 0, blocks, 1, True)])
        if self.graphs.has_head and count > 1:
            self._backend.head_pass(0, [HeadRows(tokens[1:], 1, blocks, states[:-1])])

    def _copied(
        self, emitted: Tensor, tops: list[int | None], logprobs: tuple[Tensor, Tensor] | None
    ) -> LaunchedRound:
        """Copies for the host, and the event after which they are whole."""
        host = _to_host(emitted)
        found = None if logprobs is None else (_to_host(logprobs[0]), _to_host(logprobs[1]))
        return LaunchedRound(host, self._mark(), tops, found)

    def _mark(self) -> torch.cuda.Event | None:
        """A point in what the device has been given to do, with a time that it will know."""
        if not self.batch.lengths.is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _to_host(values: Tensor) -> Tensor:
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
