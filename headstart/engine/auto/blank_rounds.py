"""Rounds of blank requests, run and timed as the engine runs real ones, for `profile.py`.

Blank requests own the first blocks of the K/V memory, which is scratch before the first real
request. All contact of profiling with runners, drafters and captured rounds is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from headstart.engine.auto.costs import MENU
from headstart.engine.drafter import Drafter
from headstart.engine.request import Request
from headstart.engine.runner import Runner
from headstart.engine.scheduler import Work
from headstart.engine.state_pool import StateRows
from headstart.engine.verifier import verify
from headstart.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headstart.backends.cuda.rounds import Kind
    from headstart.engine.seating import Seating

_CONTEXT = 32  # tokens of context of a pass, where there is room for them
_PASS_REPEATS = 3

_SIZES = (1, 4, 16, 64, 256)  # of captured rounds: with the menu, 40 captures at most
_MARGIN = 64  # tokens that a request may get while rounds are timed
_ROUND_REPEATS = 2


class BlankPasses:
    """Times verifications and drafts that the host drives."""

    def __init__(
        self, runner: Runner, drafter: Drafter, *, num_blocks: int, max_rows: int, one_by_one: bool
    ):
        self.runner, self._drafter, self._one_by_one = runner, drafter, one_by_one
        self._num_blocks, self._max_rows = num_blocks, max_rows
        self._modules = runner.head.num_modules if runner.head is not None else 0
        self._longest = min(num_blocks * runner.block_size, runner.trunk_model.rotary.num_positions)
        self._context = max(self._modules + 1, min(_CONTEXT, self._longest // 2))

    def _blocks_each(self, drafts: int) -> int:
        return -(-(self._context + drafts + 2) // self.runner.block_size)

    def has_room(self, batch: int, drafts: int) -> bool:
        """Whether there is memory for such a round."""
        return (
            self._context + drafts + 2 <= self._longest
            and batch * self._blocks_each(drafts) <= self._num_blocks
            and batch * (drafts + 1) <= self._max_rows
        )

    def verify_seconds(self, batch: int, drafts: int, params: SamplingParams) -> float:
        works = self._works(self._blank(batch, drafts, params), drafts)

        def check() -> None:
            logits = self.runner.trunk(works)[1]
            verify(works, logits, one_by_one=self._one_by_one, chooser=self.runner.chooser)

        return self._seconds(check)

    def draft_seconds(self, batch: int, drafts: int, params: SamplingParams) -> float:
        requests = self._blank(batch, drafts, params)
        runner = self.runner
        size = (self._modules, runner.trunk_model.config.hidden)
        boundary = torch.zeros(size, dtype=runner.dtype, device=runner.device)
        vocabs = {name: len(vocab.ids) for name, vocab in runner.draft_vocabs.items()}
        largest = max(vocabs, key=lambda name: vocabs[name], default=None)

        def draft() -> None:
            for request in requests:
                request.draft_vocab = largest  # what a draft costs at most
                request.head.resume(self._context, boundary, parallel=runner.is_parallel)
            self._drafter.propose(dict.fromkeys(requests, drafts))

        works = self._works(requests, 0)

        def trunk() -> None:
            runner.trunk(works)

        return self._seconds(draft, before=trunk)

    def _works(self, requests: Sequence[Request], drafts: int) -> list[Work]:
        states = None
        if self.runner.num_states:  # slots are scratch, too
            states = StateRows(0, tuple((row + 1, 0) for row in range(drafts + 1)))
        return [Work(r, self._context, drafts + 1, (0,) * drafts, states) for r in requests]

    def _blank(self, batch: int, drafts: int, params: SamplingParams) -> list[Request]:
        """Requests of blank tokens that own the first blocks."""
        each, requests = self._blocks_each(drafts), []
        for number in range(batch):
            tokens = [0] * (self._context + 1)
            request = Request(f"cost/{number}", tokens, params, 0, 1, frozenset(), number)
            request.num_computed = self._context
            request.blocks = list(range(number * each, (number + 1) * each))
            requests.append(request)
        return requests

    def _seconds(self, run: Callable[[], None], before: Callable[[], None] | None = None) -> float:
        """`before` is not timed, but leaves the caches of the processor as they are in a round."""
        times = []
        for _ in range(1 + _PASS_REPEATS):
            if before is not None:
                before()
                self._wait()
            started = time.perf_counter()
            run()
            self._wait()
            times.append(time.perf_counter() - started)
        return min(times[1:])

    def _wait(self) -> None:
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()


class BlankRounds:
    """Times captured rounds; serving goes on with what was captured."""

    def __init__(self, seating: Seating):
        self._graphs, self._kinds = seating.graphs, seating.kinds
        self._tensors, self._pool = seating.seats, seating.scheduler.pool
        self._max_tokens, self._num_states = seating.max_tokens, seating.runner.num_states
        self.window = seating.kinds.window

    def sizes(self) -> list[int]:
        """Batch sizes to time; those between are captured when they are needed."""
        return sorted({self._graphs.bucket(min(size, self._tensors.count)) for size in _SIZES})

    def kinds(self, max_drafts: int) -> list[Kind]:
        """Rounds that are run here, where there is memory for all: to compile them before."""
        menu = [drafts for drafts in MENU if drafts <= max_drafts]
        return [
            kind
            for size in self.sizes()
            for kind in [
                *(self._kind(size, drafts) for drafts in menu),
                *(self._kind(size, drafts, reads_window=True) for drafts in (0, 1)),
            ]
        ]

    def fitting(self, size: int, tokens: int) -> int:
        """Tokens of context, up to so many, that each of `size` requests has memory for."""
        slots = self._pool.num_blocks // size * self._pool.block_size
        return min(tokens, min(slots, self._max_tokens) - _MARGIN)

    def seconds(self, size: int, drafts: int, context: int, *, reads_window: bool = False) -> float:
        """One replay of a round; it is compiled and captured before."""
        kind = self._kind(size, drafts, reads_window=reads_window)
        self._fill(kind, context)
        while not self._kinds.is_captured(kind):
            self._kinds.run(kind)
        times = []
        for _ in range(_ROUND_REPEATS):
            self._fill(kind, context)
            times.append(self._time(kind))
        return min(times)

    def prepare_changes(self, size: int, context: int) -> None:
        """Capture the round by which K rises from 0, and the head's reading where few have one."""
        self.seconds(size, 1, context, reads_window=True)
        self._graphs.catch_up(range(size), self.window)

    def clear(self) -> None:
        """Leave no blank request behind."""
        self._fill(self._kind(self._tensors.count, 0), 0)

    def _kind(self, size: int, drafts: int, *, reads_window: bool = False) -> Kind:
        from headstart.backends.cuda.rounds import Kind  # not where there is no GPU

        return Kind(size, drafts, self.window) if reads_window else Kind.usual(size, drafts)

    def _time(self, kind: Kind) -> float:
        if not self._tensors.lengths.is_cuda:
            started = time.perf_counter()
            self._kinds.run(kind)
            return time.perf_counter() - started
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        self._kinds.run(kind)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def _fill(self, kind: Kind, context: int) -> None:
        """Requests in the middle of an answer, with blocks of their own; none without context."""
        tensors, count = self._tensors, kind.count
        tensors.lengths[:count] = context
        tensors.left[:count] = _MARGIN if context else 0
        tensors.limits[:count] = kind.num_drafts
        tensors.pending[:count] = max(1, kind.head_rows) if context else 0
        if context:
            each = -(-(context + _MARGIN) // self._pool.block_size)
            blocks = torch.arange(count * each, dtype=torch.int32, device=tensors.tables.device)
            tensors.tables[:count, :each] = blocks.view(count, each)
        if (recurrent := tensors.recurrent) is not None:
            # A state each, as far as there are so many: one for all would not leave the caches.
            slots = torch.arange(count, dtype=torch.int32, device=recurrent.slots.device)
            recurrent.slots[:count] = slots % self._num_states
            # Every round repeats a row of the one before; never more than there are.
            recurrent.replays[:count] = min(1, max(0, context - 1))
